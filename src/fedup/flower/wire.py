"""Questions and answers as Flower messages: one JSON text and arrays. No pickle: messages come from strangers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedup.clients.messages import FORMAT, NONCE, answer_text, arrays_size, field_size, question_text, text_size
from fedup.clients.question import PrivateQuestion, Question
from fedup.errors import DataError

__all__ = ["NONCE", "QUERY", "Answer", "Ask", "read_answer", "read_ask", "write_answer", "write_ask"]

QUERY = "fedup"  # nodes register it, and messages are of the type query.fedup
Status = Literal["ok", "refused", "failed", "needs weights", "lost"]  # a lost answer is never sent
ROW = (
    "row"  # a detail: the shape and type of a row, so that a node can try the model on a blank one before it reads any
)
_MOST_OF_A_ROW = 100_000_000  # numbers
_TYPES = {"float16", "float32", "float64", "int32", "int64", "uint8", "bool"}


@dataclass(frozen=True)
class Ask:
    """A question to one node: of which kind, about which model, and its details."""

    kind: str
    base: str  # fingerprint of the model
    details: Mapping[str, Any] = field(default_factory=dict)  # plain data
    weights: Mapping[str, Tensor] | None = None  # for nodes that lack them
    record: ArrayRecord | None = None  # the same as it is sent, which messages may share
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  # that belong to the question itself
    question: Question[Any] | None = None  # at the server: what it was made of

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
    """What a node says; `size` is the number of bytes of it that were sent."""

    status: Status
    base: str
    details: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    size: int = 0


def write_ask(ask: Ask) -> RecordDict:
    """As the content of a message."""
    content = RecordDict({"fedup": ConfigRecord({"json": question_text(ask.kind, ask.base, ask.details)})})
    if ask.record is not None:
        content["weights"] = ask.record
    elif ask.weights is not None:
        content["weights"] = record_of(ask.weights)
    if ask.arrays:
        content["arrays"] = record_of(ask.arrays)
    return content


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower sends them."""
    return ArrayRecord({name: array_of(tensor) for name, tensor in tensors.items()})


def read_ask(content: RecordDict) -> Ask:
    """The opposite of `write_ask`."""
    told = text_of(content)
    weights, arrays = (content.array_records.get(name) for name in ("weights", "arrays"))
    tensors = None if weights is None else {name: tensor_of(array, name) for name, array in weights.items()}
    own = {name: tensor_of(array, name) for name, array in arrays.items()} if arrays is not None else {}
    try:
        return Ask(str(told["kind"]), str(told["base"]), dict(told["details"]), tensors, arrays=own)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"The question lacks a part ({error!r}).") from error


def row_of(example: Tensor) -> dict[str, Any]:
    """What a row looks like, as plain data.

    >>> row_of(torch.zeros(1, 3, 32, 32))
    {'shape': [3, 32, 32], 'type': 'float32'}
    """
    return {"shape": list(example.shape[1:]), "type": str(example.dtype).removeprefix("torch.")}


def blank_from(told: object) -> Tensor:
    """The opposite of `row_of`: one row of zeros. (1, …)"""
    shape, name = (told.get("shape"), told.get("type")) if isinstance(told, dict) else (None, None)
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or name not in _TYPES or math.prod(shape or []) > _MOST_OF_A_ROW:
        raise DataError("The question does not say what a row looks like: a shape and a type of plain numbers.")
    return torch.zeros(1, *(shape or []), dtype=getattr(torch, name))


def write_answer(answer: Answer) -> RecordDict:
    """As the content of a message."""
    text = answer_text(answer.status, answer.base, answer.details, answer.reason)
    content = RecordDict({"fedup": ConfigRecord({"json": text})})
    if answer.arrays:
        content["arrays"] = record_of(answer.arrays)
    return content


def read_answer(content: RecordDict, *, most_bytes: int) -> Answer:
    """The opposite of `write_answer`; anything out of shape raises DataError."""
    size = size_of(content)
    if size > most_bytes:
        raise DataError(f"{size:,} bytes came, and at most {most_bytes:,} are taken")
    told = text_of(content)
    record = content.array_records.get("arrays")
    if record and "__metadata__" in record:
        raise DataError("an array has a name that no file can hold")
    arrays = {name: tensor_of(array, name) for name, array in record.items()} if record else {}
    status = told.get("status")
    if status not in ("ok", "refused", "failed", "needs weights") or not isinstance(told.get("details"), dict):
        raise DataError("the answer says neither what it is nor what it holds")
    return Answer(status, str(told.get("base")), told["details"], arrays, str(told.get("reason", ""))[:500], size)


def size_of(content: RecordDict) -> int:
    """Bytes of a message's records as protocol buffers: exactly for what fedup sends, and about for anything else.

    Not counted is what Flower and gRPC put around them, some hundred bytes a message and an array.
    """
    records: list[tuple[str, int]] = []
    for key, arrays in content.array_records.items():
        told = ((name, array.dtype, array.shape, len(array.data)) for name, array in arrays.items())
        records.append((key, arrays_size(told)))
    for named in (content.config_records, content.metric_records):
        for key, values in named.items():
            records.append(
                (key, sum(field_size(text_size(name) + _value_size(value)) for name, value in values.items()))
            )
    return sum(field_size(text_size(key) + field_size(size)) for key, size in records)


def _value_size(value: object) -> int:
    """Of a text, bytes, a number, or a list of them; numbers take eight bytes at most."""
    if isinstance(value, str):
        return field_size(text_size(value))
    if isinstance(value, list):
        return field_size(field_size(sum(map(_value_size, value))))
    return field_size(field_size(len(value))) if isinstance(value, bytes) else 8


def array_of(tensor: Tensor) -> Array:
    """A tensor as Flower sends it."""
    try:
        return Array(tensor.detach().cpu().contiguous().numpy())
    except TypeError as error:
        raise DataError(f"Flower sends no tensors of {tensor.dtype}. Convert them first.") from error


def tensor_of(array: Array, name: str) -> Tensor:
    """A tensor as it came; of no type but plain numbers."""
    try:
        values: np.ndarray = array.numpy()
        if not isinstance(values, np.ndarray) or values.dtype.name not in _TYPES:
            raise DataError(f"{name} is of {getattr(values, 'dtype', type(values).__name__)}")
        return torch.from_numpy(np.array(values))  # a copy: what came may be read-only
    except DataError:
        raise
    except Exception as error:  # whatever numpy says of bytes that are no array
        raise DataError(f"{name} is no array ({type(error).__name__})") from error


def text_of(content: RecordDict) -> dict[str, Any]:
    """The text of a message, without its arrays."""
    try:
        told = json.loads(str(content.config_records["fedup"]["json"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise DataError("there is no readable fedup record in the message") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        found = told.get("format") if isinstance(told, dict) else None
        raise DataError(f"the message is of format {found!r}; this fedup speaks {FORMAT}")
    return told
