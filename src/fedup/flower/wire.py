"""Questions and answers as Flower messages: a JSON text and arrays. No pickle: messages come from strangers."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from fedup.clients.messages import FORMAT, NONCE, answer_text, arrays_size, field_size, question_text, text_size
from fedup.clients.question import PrivateQuestion, Question
from fedup.errors import DataError, FedUPError

QUERY = "fedup"  # messages have the type query.fedup
Status = Literal["ok", "refused", "failed", "needs weights", "lost", "unreadable"]  # the last two are never sent
ROW = "row"  # a detail: shape and type of a row, so that a node can try the model on a blank one first
_MOST_OF_A_ROW = 100_000_000  # numbers
_NPY = b"\x93NUMPY\x01\x00"  # how numpy's files of version 1 start
_DEEPEST = 32  # lists in lists of a message
_TYPES = {"float16", "float32", "float64", "int32", "int64", "uint8", "bool"}
_Record = TypeVar("_Record", ArrayRecord, ConfigRecord, MetricRecord)


@dataclass(frozen=True)
class Ask:
    """A question to one node: its kind, its details, and the model in question."""

    kind: str
    base: str  # fingerprint of the model
    details: Mapping[str, Any] = field(default_factory=dict)  # plain data
    weights: Mapping[str, Tensor] | None = None  # for nodes that lack them
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  # of the question itself
    question: Question[Any] | None = None  # at the server: the question behind it
    name: str = ""  # at the server: of the release; at the node it is one of the details

    def named(self, name: str) -> "Ask":
        """The same question for one release; without a name, the question itself."""
        if not name:
            return self
        own = replace(self, name=name)
        own.__dict__["digest"] = self.digest
        return own

    @cached_property
    def digest(self) -> str:
        """Identifies the same question about the same model, whatever the name of the release."""
        details = {key: value for key, value in self.details.items() if key != NONCE}
        return hashlib.sha256(json.dumps([self.kind, self.base, details], sort_keys=True).encode()).hexdigest()

    @property
    def is_release(self) -> bool:
        """Whether its answer is a release under differential privacy."""
        return isinstance(self.question, PrivateQuestion)

    @property
    def needs_model(self) -> bool:
        """Whether a node needs the weights to answer it."""
        return self.question is None or self.question.needs_model


@dataclass(frozen=True)
class Answer:
    """A node's answer; `size` is the number of bytes that were sent."""

    status: Status
    base: str
    details: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    size: int = 0


def write_ask(ask: Ask, weights: ArrayRecord | None = None) -> RecordDict:
    """The content of a message; `weights` is a record that several messages share."""
    details = {**ask.details, NONCE: ask.name} if ask.name else ask.details
    content = _content(question_text(ask.kind, ask.base, details), ask.arrays)
    if weights is None and ask.weights is not None:
        weights = record_of(ask.weights)
    if weights is not None:
        content["weights"] = weights
    return content


def read_ask(content: RecordDict) -> Ask:
    """The inverse of `write_ask`."""
    text, records = _text_of(content), _records(content, ArrayRecord)
    weights = tensors_of(records["weights"]) if "weights" in records else None
    arrays = tensors_of(records.get("arrays"))
    try:
        return Ask(str(text["kind"]), str(text["base"]), dict(text["details"]), weights, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"The question lacks a part ({error!r}).") from error


def write_answer(answer: Answer) -> RecordDict:
    """The content of a message."""
    return _content(answer_text(answer.status, answer.base, answer.details, answer.reason), answer.arrays)


def read_answer(content: RecordDict, *, most_bytes: int) -> Answer:
    """The inverse of `write_answer`; raises DataError if anything is out of shape."""
    size = size_of(content)
    if size > most_bytes:
        raise DataError(f"{size:,} bytes came, and at most {most_bytes:,} are taken")
    text, arrays = _text_of(content), tensors_of(_records(content, ArrayRecord).get("arrays"))
    if "__metadata__" in arrays:
        raise DataError("an array has a name that no file can hold")
    status = text.get("status")
    if status not in ("ok", "refused", "failed", "needs weights") or not isinstance(text.get("details"), dict):
        raise DataError("the answer says neither what it is nor what it holds")
    return Answer(status, str(text.get("base")), text["details"], arrays, str(text.get("reason", ""))[:500], size)


@contextmanager
def only_this_answer() -> Iterator[None]:
    """Whatever an answer makes fail while it is read is a DataError: that node's failure, and nobody else's."""
    try:
        yield
    except FedUPError:
        raise
    except Exception as error:  # what strangers send can raise anything
        raise DataError(f"its answer cannot be read ({type(error).__name__})") from error


def _content(text: str, arrays: Mapping[str, Tensor]) -> RecordDict:
    content = RecordDict({"fedup": ConfigRecord({"json": text})})
    if arrays:
        content["arrays"] = record_of(arrays)
    return content


def _records(content: RecordDict, kind: type[_Record]) -> dict[str, _Record]:
    """The records of one kind.

    What Flower's own properties return refers to itself and to the message: only the garbage collector frees it.
    """
    return {key: record for key, record in content.items() if isinstance(record, kind)}


def _text_of(content: RecordDict) -> dict[str, Any]:
    """The text of a message, parsed."""
    try:
        sent = str(_records(content, ConfigRecord)["fedup"]["json"])
        text = json.loads(sent)
    except (KeyError, ValueError, RecursionError) as error:
        raise DataError("there is no readable fedup record in the message") from error
    version = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or version != FORMAT:
        raise DataError(f"the message is of format {version!r}; this fedup speaks {FORMAT}")
    if sent.count("[") + sent.count("{") > _DEEPEST:  # else nothing lies so deep
        _check_depth(text)
    return text


def _check_depth(text: dict[str, Any]) -> None:
    """Raise if lists lie in lists deeper than any message needs: what was read must not fail where it is stored."""
    level: list[Any] = [text]
    for _ in range(_DEEPEST):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [child for parts in inner for child in parts if isinstance(child, dict | list)]
        if not level:
            return
    raise DataError(f"its parts lie in each other more than {_DEEPEST} deep")


def row_of(example: Tensor) -> dict[str, Any]:
    """Shape and type of a row, as plain data.

    >>> row_of(torch.zeros(1, 3, 32, 32))
    {'shape': [3, 32, 32], 'type': 'float32'}
    """
    return {"shape": list(example.shape[1:]), "type": str(example.dtype).removeprefix("torch.")}


def blank_from(row: object) -> Tensor:
    """The inverse of `row_of`: one row of zeros. (1, …)"""
    shape, name = (row.get("shape"), row.get("type")) if isinstance(row, dict) else (None, None)
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or name not in _TYPES or math.prod(shape or []) > _MOST_OF_A_ROW:
        raise DataError("The question does not say what a row looks like: a shape and a type of plain numbers.")
    return torch.zeros(1, *(shape or []), dtype=getattr(torch, name))


def size_of(content: RecordDict) -> int:
    """Bytes of a message's records as protocol buffers: exact for what fedup sends, approximate for anything else.

    What Flower and gRPC put around them is not counted: some hundred bytes for each message and array.
    """
    records: list[tuple[str, int]] = []
    for key, arrays in _records(content, ArrayRecord).items():
        parts = ((name, array.dtype, array.shape, len(array.data)) for name, array in arrays.items())
        records.append((key, arrays_size(parts)))
    for named in (_records(content, ConfigRecord), _records(content, MetricRecord)):
        for key, values in named.items():
            sizes = (field_size(text_size(name) + _value_size(value)) for name, value in values.items())
            records.append((key, sum(sizes)))
    return sum(field_size(text_size(key) + field_size(size)) for key, size in records)


def _value_size(value: object) -> int:
    """Bytes of a text, bytes, a number, or a list of them; a number takes eight bytes at most."""
    if isinstance(value, str):
        return field_size(text_size(value))
    if isinstance(value, list):
        return field_size(field_size(sum(map(_value_size, value))))
    return field_size(field_size(len(value))) if isinstance(value, bytes) else 8


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower sends them."""
    arrays = {}
    for name, tensor in tensors.items():
        try:
            arrays[name] = Array(tensor.detach().cpu().contiguous().numpy())
        except TypeError as error:
            raise DataError(f"Flower cannot send {name}, which is of {tensor.dtype}. Convert it.") from error
    return ArrayRecord(arrays)


def tensors_of(record: ArrayRecord | None) -> dict[str, Tensor]:
    """The inverse of `record_of`; empty without a record."""
    return {name: tensor_of(array, name) for name, array in record.items()} if record is not None else {}


def tensor_of(array: Array, name: str) -> Tensor:
    """An array as a tensor; raises DataError unless it holds plain numbers."""
    try:
        values: np.ndarray = _numbers_in(array)
        dtype = values.dtype.name
    except Exception as error:  # numpy raises anything for bytes that are no array
        raise DataError(f"{name} is no array ({type(error).__name__})") from error
    if not isinstance(values, np.ndarray) or dtype not in _TYPES or not values.dtype.isnative:
        raise DataError(f"{name} is of {dtype}, or of another byte order")
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # no second copy: it may be large


def _numbers_in(array: Array) -> np.ndarray:
    """What `array.numpy()` gives; the header, which many messages share, is parsed once."""
    data = array.data
    if array.stype != "numpy.ndarray" or data[:8] != _NPY:
        return array.numpy()
    start = 10 + int.from_bytes(data[8:10], "little")
    shape, in_columns, dtype = _parsed(data[8:start])
    if in_columns or dtype.hasobject or len(data) - start != math.prod(shape) * dtype.itemsize:
        return array.numpy()
    return (
        np.frombuffer(data, dtype=dtype, offset=start).reshape(shape) if len(data) > start else np.zeros(shape, dtype)
    )


@lru_cache(maxsize=256)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    return np.lib.format.read_array_header_1_0(BytesIO(header))


def load_arrays(model: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Load weights as Flower's strategies return them, in place; the model is in eval mode afterwards."""
    return load_weights(model, tensors_of(arrays)).eval()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load weights in place; raises DataError if they belong to another model."""
    try:
        model.load_state_dict(dict(weights))
    except (RuntimeError, KeyError) as error:
        raise DataError("The weights do not fit this model: it is of another shape.") from error
    return model
