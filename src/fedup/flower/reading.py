"""Answers of nodes made into what the core works with; whatever does not fit raises DataError: nothing is guessed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedup import messages
from fedup.client import Summarizing, Summary
from fedup.eraser_statistics import GroupSpreads, Sketches, Spread
from fedup.errors import DataError
from fedup.flower.wire import Answer
from fedup.kmeans import centroid_count
from fedup.messages import SPENT
from fedup.moments import Moments, Sums
from fedup.privacy.guarantee import DP
from fedup.private_erasure import NoisyStatistics
from fedup.proportions import Paired
from fedup.tally import MOST_CLASS_ROWS, MOST_ROWS, Tally

_LARGEST_CLIP = 1e12
_LARGEST = 1e30  # of a number: its square is one, too
_LARGEST_SPENT = 1e12  # μ²: of a client that has released everything a million times
_FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Expected:
    """What a summary must look like: the server's own model says so, and what was asked."""

    how: Summarizing | DP
    shape: tuple[int, ...]  # of one row's features at the cut
    width: int  # numbers in a vector
    nonnegative: bool
    num_classes: int
    labels: frozenset[int] | None = None  # asked for; None: whatever the node holds
    without: frozenset[int] = frozenset()  # classes that nobody asked for
    excluded: frozenset[int] = frozenset()  # samples to be left out
    classes: Mapping[int, int] = field(default_factory=dict)  # of such samples, where they are known


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
    """A summary with all its parts in shape, of just what was asked for."""
    labels, sizes = _whole_numbers(answer, "labels"), _whole_numbers(answer, "sizes")
    excluded = _lists(answer, "excluded")
    _require(labels == sorted(set(labels)), "a class comes twice, or classes are out of order")
    _require(all(0 <= label < expected.num_classes for label in labels), "a label is out of range")
    _require(not expected.without & set(labels), "it tells of classes that nobody asked for")
    _require(expected.labels in (None, frozenset(labels)), "it tells of other classes than were asked for")
    _require(len(sizes) == len(labels) == len(excluded), "its lists differ in length")
    _require(all(size >= 0 for size in sizes), "a size is below 0")
    vectors = _floats(answer, "vectors", (sum(sizes), expected.width)).float()
    _require(bool(vectors.isfinite().all()), "vectors holds what single precision does not")
    counts = _array(answer, "counts", (sum(sizes),))
    _require(counts.dtype in (torch.int32, torch.int64), "its counts are no whole numbers")
    _require(bool(((counts >= 1) & (counts.long() < 2**31)).all()), "a count of points is out of range")
    _require(_list(answer, "shape") == list(expected.shape), "its features have another shape")
    _require(answer.details.get("nonnegative") is expected.nonnegative, "its features are of another kind")
    epsilons = _list(answer, "paper_epsilons")
    _require(all(isinstance(one, int | float) for one in epsilons), "its epsilons are no numbers")
    _require(len(epsilons) in (0, len(labels)), "its epsilons are of other cells")
    rows = dict(_pairs(answer, "rows"))
    if isinstance(expected.how, DP):
        _require(set(sizes) <= {1} and not rows, "it tells of sizes, which a guarantee keeps secret")
        every = frozenset(range(expected.num_classes)) - expected.without
        _require(frozenset(labels) == (every if expected.labels is None else expected.labels), "a class is missing")
        _require(all(ids == expected.excluded for ids in excluded), "it leaves out other samples than were named")
    else:
        _check_cells(expected, expected.how, labels, sizes, excluded, counts, rows)
    return Told(
        Summary(
            client_of(answer),
            tuple(labels),
            tuple(sizes),
            tuple(excluded),
            vectors,
            counts.to(torch.int32),
            expected.nonnegative,
            expected.shape,
            tuple(float(one) for one in epsilons),
        ),
        rows,
    )


def _check_cells(
    expected: Expected,
    how: Summarizing,
    labels: Sequence[int],
    sizes: Sequence[int],
    excluded: Sequence[frozenset[int]],
    counts: Tensor,
    rows: Mapping[int, int],
) -> None:
    """Rows, samples left out, centroids and the points behind them must add up in each cell."""
    _require(rows.keys() == set(labels), "its rows are of other classes than its centroids")
    for label, size, ids, points in zip(labels, sizes, excluded, counts.split(list(sizes)), strict=True):
        named = frozenset(one for one in expected.excluded if expected.classes.get(one, label) == label)
        _require(ids <= named, "it leaves out samples that nobody named")
        _require(all(one in ids for one in named if one in expected.classes), "it does not leave out what was named")
        left = rows[label] - len(ids)
        _require(left >= 0, f"class {label} has fewer rows than are left out of it")
        _require(size in (0, centroid_count(left, how.ratio)), f"class {label} has a wrong number of centroids")
        _require(not size or int(points.sum()) == left, f"the points of class {label} are not as many as its rows")


def labels_of(answer: Answer, samples: frozenset[int], num_classes: int) -> dict[int, int]:
    """Classes of exactly these samples."""
    found = dict(_pairs(answer, "labels"))
    _require(found.keys() == samples, "it tells the classes of other samples")
    _require(all(0 <= label < num_classes for label in found.values()), "a label is out of range")
    return found


def sketches_of(answer: Answer, shape: tuple[int, int], names: Collection[str], num_classes: int) -> Sketches:
    """Sketches of these requests' rows and of retained classes."""
    forgotten = {name: _sums(answer, f"forgotten/{name}", count, shape) for name, count in _named(answer, "forgotten")}
    retained = {label: _sums(answer, f"retained/{label}", n, shape) for label, n in _pairs(answer, "retained")}
    _require(set(forgotten) <= set(names), "it tells of a request that nobody named")
    _require(all(-1 <= label < num_classes for label in retained), "a label is out of range")
    return Sketches(forgotten, retained)


def spreads_of(
    answer: Answer, spreads: Mapping[str, tuple[int, int]], names: Collection[str], shares: Mapping[str, float]
) -> GroupSpreads:
    """Means and variances at all of these cuts; a client's share of each mixture is what it was given."""
    found: dict[str, dict[str, dict[str, Spread]]] = {"forgotten": {}, "reference": {}}
    for kind, groups in found.items():
        told = answer.details.get(kind)
        if not isinstance(told, dict) or not set(told) <= set(names):
            raise DataError("it tells of a request that nobody named")
        for name, weights in told.items():
            if not isinstance(weights, dict) or set(weights) != set(spreads):
                raise DataError("it tells of other cuts than were asked about")
            groups[name] = {
                cut: _spread(answer, f"{kind}/{name}/{cut}", weights[cut], shape) for cut, shape in spreads.items()
            }
    for name, cuts in found["reference"].items():
        fits = all(one.weight <= shares.get(name, 0.0) * (1 + 1e-6) + 1e-9 for one in cuts.values())
        _require(fits, "it takes a larger share of the mixture than it was given")
    return GroupSpreads(found["forgotten"], found["reference"])


def moments_of(answer: Answer, spread: tuple[int, int]) -> Moments | None:
    """Second moments at so many positions and channels; None where the node has too few rows."""
    if answer.details.get("none") is True:
        return None
    positions, channels = spread
    half = _floats(answer, "squares", (positions, channels * (channels + 1) // 2))
    count = answer.details.get("count")
    if type(count) is not int or not 0 < count < 2**53:
        raise DataError("a count of rows is out of range")
    return Moments(count, _floats(answer, "sums", spread), messages.whole_of(half, channels))


def tally_of(answer: Answer, names: Collection[str], num_classes: int) -> Tally:
    """Counts of answers: hits are no more than rows, and of requests that were named."""
    groups: dict[str, dict[str, dict[int, Paired]]] = {}
    for kind in ("forgotten", "unseen"):
        told = answer.details.get(kind)
        if not isinstance(told, dict) or not set(told) <= set(names):
            raise DataError("it counts answers for a request that nobody named")
        groups[kind] = {name: _counts(rows, num_classes, most=MOST_ROWS) for name, rows in told.items()}
    training, held_out = (
        _counts(answer.details.get(part), num_classes, most=MOST_CLASS_ROWS) for part in ("retained", "held_out")
    )
    return Tally(training, held_out, groups["forgotten"], groups["unseen"])


def _counts(told: object, num_classes: int, *, most: int) -> dict[int, Paired]:
    """By class; no node counts more than so many rows of one, so that none outvotes all others."""
    if not isinstance(told, list):
        raise DataError("its counts are no list")
    found = {}
    for row in told:
        numbers = isinstance(row, list) and len(row) == 5 and all(type(one) in (int, float) for one in row)
        _require(numbers, "a count is no row of five numbers")
        label, rows, before, after, both = row
        _require(type(label) is int and 0 <= label < num_classes, "a label is out of range")
        _require(label not in found, "a label comes twice")
        _require(0 < rows <= most and 0 <= both <= min(before, after), "counts do not add up")
        _require(max(before, after) <= rows and before + after - both <= rows + 1e-6, "there are more hits than rows")
        found[label] = Paired(rows, before, after, both)
    return found


def _spread(answer: Answer, name: str, weight: object, shape: tuple[int, int]) -> Spread:
    if type(weight) not in (int, float) or not 0 < float(weight) < 2**53:  # type: ignore[arg-type]
        raise DataError("a weight is out of range")
    variance = _floats(answer, f"{name}/variance", shape)
    _require(bool((variance >= 0).all()), "a variance is below 0")
    return Spread(float(weight), _floats(answer, f"{name}/mean", shape), variance)  # type: ignore[arg-type]


def _sums(answer: Answer, name: str, count: int, shape: tuple[int, int]) -> Sums:
    _require(0 < count < 2**53, "a count of rows is out of range")
    return Sums(count, _floats(answer, name, shape))


def _named(answer: Answer, key: str) -> list[tuple[str, int]]:
    found = []
    for pair in _list(answer, key):
        fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        _require(fits, f"{key} holds something that is no pair of a name and a count")
        found.append((pair[0], pair[1]))
    return found


def noisy_of(answer: Answer, spread: tuple[int, int], num_classes: int) -> NoisyStatistics:
    """Noisy statistics for an eraser at so many positions and channels."""
    clip = answer.details.get("clip")
    if not isinstance(clip, int | float) or not 0 < clip < _LARGEST_CLIP:
        raise DataError("its clip is no positive number, or one that no feature has")
    sums, counts = _floats(answer, "sums", None), _floats(answer, "counts", None)
    groups = len(counts.flatten()) - 1  # retained rows class by class, or all together where that would be too much
    _require(groups in (1, num_classes) and counts.ndim == 1, "its counts are of other groups")
    _require(tuple(sums.shape) == (groups + 2, *spread), f"sums is of shape {tuple(sums.shape)}")
    return NoisyStatistics(sums, counts, float(clip))


def spent_of(answer: Answer) -> float | None:
    """The sum of μ² over all that the client has released, by its own account; None where it tells none of use."""
    told: Any = answer.details.get(SPENT)
    is_number = isinstance(told, int | float) and not isinstance(told, bool)
    return float(told) if is_number and 0 <= told <= _LARGEST_SPENT else None


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
    _require(not tensor.numel() or float(tensor.abs().max()) < _LARGEST, f"{name} holds what no feature has")
    return tensor


def _list(answer: Answer, name: str) -> list[Any]:
    values = answer.details.get(name)
    if not isinstance(values, list):
        raise DataError(f"{name} is no list")
    return values


def _whole_numbers(answer: Answer, name: str) -> list[int]:
    values = _list(answer, name)
    _require(all(type(value) is int for value in values), f"{name} is no list of whole numbers")
    return values


def _lists(answer: Answer, name: str) -> list[frozenset[int]]:
    values = _list(answer, name)
    for value in values:
        numbers = isinstance(value, list) and all(type(one) is int for one in value)
        _require(numbers, f"{name} holds something that is no list of whole numbers")
    return [frozenset(value) for value in values]


def _pairs(answer: Answer, name: str) -> list[tuple[int, int]]:
    values = _list(answer, name)
    for pair in values:
        _require(
            isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair),
            f"{name} is no list of pairs of whole numbers",
        )
    return [(pair[0], pair[1]) for pair in values]
