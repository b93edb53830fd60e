"""Messages of one JSON text and arrays, whatever carries them, and their size in bytes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

FORMAT = 1
TARGETS = "targets"  # a detail: "labels" or "values", where the model has no classes
NONCE = "release"  # a detail: the name of a release under DP, by which it can be asked for again
RULES = "rules"  # a detail: what a node calls its own rules
SPENT = "spent"  # a detail: the sum of μ² by the client's own account
_NUMPY_HEADER = 128  # bytes before an array's numbers
_TEXT_PART = 1_000_000  # characters


def question_text(kind: str, base: str, details: Mapping[str, Any]) -> str:
    """A question about the model with that fingerprint."""
    return json.dumps({"format": FORMAT, "kind": kind, "base": base, "details": dict(details)})


def answer_text(status: str, base: str, details: Mapping[str, Any], reason: str = "") -> str:
    """An answer, or why there is none."""
    return json.dumps({"format": FORMAT, "status": status, "base": base, "details": dict(details), "reason": reason})


def message_size(text: str, tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a message with this text and these arrays, in Flower's protocol buffers."""
    arrays = [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, _NUMPY_HEADER + tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    record = field_size(arrays_size(arrays)) + text_size("arrays") if arrays else 0
    named_text = field_size(text_size("json") + field_size(text_size(text)))
    return field_size(text_size("fedup") + field_size(named_text)) + (field_size(record) if record else 0)


def arrays_size(arrays: Iterable[tuple[str, str, Sequence[int], int]]) -> int:
    """Bytes of a record of arrays, each given by name, type, shape and bytes of data."""
    size = 0
    for name, dtype, shape, n in arrays:
        numbers = field_size(sum(map(_number_size, shape))) if len(shape) else 0
        array = text_size(dtype) + numbers + text_size("numpy.ndarray") + field_size(n)
        size += field_size(text_size(name) + field_size(array))
    return size


def text_size(text: str) -> int:
    """Bytes of a text as a field."""
    if text.isascii():  # without a copy: what strangers send may be long
        return field_size(len(text))
    parts = (text[start : start + _TEXT_PART] for start in range(0, len(text), _TEXT_PART))
    return field_size(sum(len(part.encode(errors="surrogatepass")) for part in parts))


def field_size(size: int) -> int:
    """Bytes of a field with so many bytes of content: a tag of one byte and the length come first."""
    return 1 + _number_size(size) + size


def _number_size(number: int) -> int:
    """Seven bits to a byte."""
    return max(1, -(-number.bit_length() // 7))
