"""Checks of a message: whatever does not fit raises DataError, and nothing is guessed."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedup.errors import DataError

_LARGEST = 1e30  # of a number: its square is one, too
_FLOATS = (torch.float16, torch.float32, torch.float64)
_WHOLE = torch.iinfo(torch.int64)


def require(holds: bool, otherwise: str) -> None:
    """Raise DataError unless a condition holds."""
    if not holds:
        raise DataError(otherwise)


def client_number(details: Mapping[str, Any]) -> int:
    """The client that an answer names as its own."""
    client = details.get("client")
    if type(client) is not int or not 0 <= client < 2**63:
        raise DataError("it does not say which client it is")
    return client


def array(arrays: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    """An array, of that shape if one is given."""
    tensor = arrays.get(name)
    if tensor is None:
        raise DataError(f"{name} is missing")
    require(shape is None or tuple(tensor.shape) == shape, f"{name} is of shape {tuple(tensor.shape)}, not {shape}")
    return tensor


def floats(arrays: Mapping[str, Tensor], name: str, shape: tuple[int, ...] | None) -> Tensor:
    """An array of finite numbers, not too large for features."""
    tensor = array(arrays, name, shape)
    require(tensor.dtype in _FLOATS, f"{name} is of {tensor.dtype}")
    if tensor.numel():  # by two numbers, without a copy: NaN shows in both
        least, most = (float(bound) for bound in tensor.aminmax())
        require(math.isfinite(least) and math.isfinite(most), f"{name} holds NaN or infinity")
        require(max(-least, most) < _LARGEST, f"{name} holds numbers too large for features")
    return tensor


def list_of(details: Mapping[str, Any], name: str) -> list[Any]:
    """A list of anything."""
    values = details.get(name)
    if not isinstance(values, list):
        raise DataError(f"{name} is no list")
    return values


def _is_whole(value: object) -> bool:
    return type(value) is int and _WHOLE.min <= value <= _WHOLE.max


def whole_numbers(details: Mapping[str, Any], name: str) -> list[int]:
    """A list of whole numbers that 64 bits hold."""
    values = list_of(details, name)
    require(all(_is_whole(value) for value in values), f"{name} is no list of whole numbers")
    return values


def whole_set(details: Mapping[str, Any], name: str) -> frozenset[int]:
    """Whole numbers as a set."""
    return frozenset(whole_numbers(details, name))


def text_set(details: Mapping[str, Any], name: str) -> frozenset[str]:
    """Texts as a set."""
    values = list_of(details, name)
    require(all(isinstance(value, str) for value in values), f"{name} is no list of texts")
    return frozenset(values)


def pairs(details: Mapping[str, Any], name: str, *, named: bool = False) -> list[tuple[Any, int]]:
    """A list of pairs of whole numbers, or of a name and a whole number."""
    values = list_of(details, name)
    wrong = "holds something that is no pair of a name and a count" if named else "is no list of pairs of whole numbers"
    for pair in values:
        fits = isinstance(pair, list) and len(pair) == 2 and _is_whole(pair[1])
        require(fits and (isinstance(pair[0], str) if named else _is_whole(pair[0])), f"{name} {wrong}")
    return [(pair[0], pair[1]) for pair in values]


def by_request(details: Mapping[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    """An object whose keys are names of requests that were sent."""
    values = details.get(name)
    if not isinstance(values, dict) or not set(values) <= known:
        raise DataError("it names a request that nobody sent")
    return values


def text(details: Mapping[str, Any], name: str) -> str:
    """A text."""
    value = details[name]
    if not isinstance(value, str):
        raise DataError(f"{name} must be a text.")
    return value
