"""Answers of nodes made into what the core works with; whatever does not fit raises DataError: nothing is guessed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedup.client import Summarizing, Summary
from fedup.errors import DataError
from fedup.flower.wire import Answer
from fedup.kmeans import centroid_count
from fedup.moments import Contrast, Moments, Shift, Sums
from fedup.privacy.guarantee import DP
from fedup.private_erasure import NoisyStatistics

SHIFT_PARTS = ("distance", "noise", "fisher", "variance")
_FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Expected:
    """What a summary must look like: the server's own model says so."""

    how: Summarizing | DP
    shape: tuple[int, ...]  # of one row's features at the cut
    width: int  # numbers in a vector
    nonnegative: bool
    num_classes: int


@dataclass(frozen=True)
class Told:
    """A node's summary, and how many rows of each class it holds; nothing of the latter under DP."""

    summary: Summary
    rows: Mapping[int, int]


def client_of(answer: Answer) -> int:
    """Which client a node says it is."""
    client = answer.details.get("client")
    if type(client) is not int or client < 0:
        raise DataError("it does not say which client it is")
    return client


def told_of(answer: Answer, expected: Expected) -> Told:
    """A summary with all its parts in shape."""
    labels, sizes = _whole_numbers(answer, "labels"), _whole_numbers(answer, "sizes")
    excluded = answer.details.get("excluded")
    _require(labels == sorted(set(labels)), "a class comes twice, or classes are out of order")
    _require(all(0 <= label < expected.num_classes for label in labels), "a label is out of range")
    _require(isinstance(excluded, list) and len(sizes) == len(labels) == len(excluded), "its lists differ in length")
    vectors = _floats(answer, "vectors", (sum(sizes), expected.width))
    counts = _array(answer, "counts", (sum(sizes),))
    _require(not counts.is_floating_point() and bool((counts >= 1).all()), "a count of points is below 1")
    _require(tuple(answer.details.get("shape") or ()) == expected.shape, "its features have another shape")
    _require(answer.details.get("nonnegative") is expected.nonnegative, "its features are of another kind")
    rows = dict(_pairs(answer, "rows"))
    if isinstance(expected.how, Summarizing):
        for label, size in zip(labels, sizes, strict=True):
            most = centroid_count(rows.get(label, 0), expected.how.ratio)
            _require(0 <= size <= most, f"{size} centroids of class {label} are too many for its rows")
    epsilons = answer.details.get("paper_epsilons") or []
    return Told(
        Summary(
            client_of(answer),
            tuple(labels),
            tuple(sizes),
            tuple(frozenset(map(int, ids)) for ids in excluded or ()),
            vectors.float(),
            counts.to(torch.int32),
            expected.nonnegative,
            expected.shape,
            tuple(float(one) for one in epsilons),
            wire_bytes=answer.size,
        ),
        rows,
    )


def labels_of(answer: Answer, samples: frozenset[int], num_classes: int) -> dict[int, int]:
    """Classes of exactly these samples."""
    found = dict(_pairs(answer, "labels"))
    _require(found.keys() == samples, "it tells the classes of other samples")
    _require(all(0 <= label < num_classes for label in found.values()), "a label is out of range")
    return found


def shifts_of(answer: Answer, cuts: Sequence[str]) -> dict[str, Shift]:
    """Shifts at some of these cuts."""
    rows = answer.details.get("rows")
    _require(isinstance(rows, dict) and set(rows) <= set(cuts), "it tells of cuts that nobody asked about")
    found = {}
    for cut, count in (rows or {}).items():
        _require(type(count) is int and count > 0, "a count of rows is below 1")
        found[cut] = Shift(count, *(_floats(answer, f"{cut}/{part}", None) for part in SHIFT_PARTS))
    return found


def contrast_of(answer: Answer, positions: int) -> Contrast | None:
    """Statistics for an eraser; None where the node has none to tell."""
    if answer.details.get("none") is True:
        return None
    sums = _floats(answer, "sums", None)
    _require(sums.ndim == 2 and len(sums) == positions, "its sums are of other positions")
    squares = _floats(answer, "squares", (*sums.shape, sums.shape[1]))
    groups: dict[str, dict[str, Sums]] = {}
    for kind in ("forgotten", "reference"):
        pairs = answer.details.get(kind)
        _require(isinstance(pairs, list), "its groups are missing")
        groups[kind] = {}
        for name, count in pairs or ():
            _require(isinstance(name, str) and isinstance(count, int | float) and count >= 0, "a group is out of shape")
            groups[kind][name] = Sums(count, _floats(answer, f"{kind}/{name}", tuple(sums.shape)))
    count = answer.details.get("count")
    _require(type(count) is int and count > 0, "a count of rows is below 1")
    return Contrast(groups["forgotten"], groups["reference"], Moments(int(count or 0), sums, squares))


def noisy_of(answer: Answer) -> NoisyStatistics:
    """Noisy statistics for an eraser."""
    clip = answer.details.get("clip")
    _require(isinstance(clip, int | float) and clip > 0, "its clip is no positive number")
    return NoisyStatistics(_floats(answer, "sums", None), _floats(answer, "counts", None), float(clip or 0))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DataError(otherwise)


def _array(answer: Answer, name: str, shape: tuple[int, ...] | None) -> Tensor:
    tensor = answer.arrays.get(name)
    if tensor is None:
        raise DataError(f"{name} is missing")
    _require(shape is None or tuple(tensor.shape) == shape, f"{name} is of shape {tuple(tensor.shape)}, not {shape}")
    return tensor


def _floats(answer: Answer, name: str, shape: tuple[int, ...] | None) -> Tensor:
    tensor = _array(answer, name, shape)
    _require(tensor.dtype in _FLOATS, f"{name} is of {tensor.dtype}")
    _require(bool(tensor.isfinite().all()), f"{name} holds NaN or infinity")
    return tensor


def _whole_numbers(answer: Answer, name: str) -> list[int]:
    values = answer.details.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DataError(f"{name} is no list of whole numbers")
    return values


def _pairs(answer: Answer, name: str) -> list[tuple[int, int]]:
    values: Any = answer.details.get(name)
    if not isinstance(values, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair) for pair in values
    ):
        raise DataError(f"{name} is no list of pairs of whole numbers")
    return [(pair[0], pair[1]) for pair in values]
