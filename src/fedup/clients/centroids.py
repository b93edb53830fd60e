"""The centroids of a client's cells."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.statistics.centroids import CentroidConfig, Summary, summarize
from fedup.statistics.kmeans import centroid_count

_LARGEST = 1e30  # ε of the paper's noise
_MOST_HELD_BACK = 1000  # rows of a class that a client's own rules may hold back


@dataclass(frozen=True)
class CentroidsQuestion(ExactQuestion[Summary]):
    """The centroids of some classes (None: all that the client holds), without some samples."""

    kind: ClassVar[str] = "summarize"
    reported_as: ClassVar[str] = "centroids"

    cut: str
    config: CentroidConfig
    labels: frozenset[int] | None = None
    without: frozenset[int] = frozenset()  # classes
    excluded: frozenset[int] = frozenset()  # samples
    half: bool = False  # vectors are sent in half precision
    sample_labels: Mapping[int, int] = field(default_factory=dict, compare=False)  # as the server knows them; not sent

    @property
    def protection(self) -> CentroidConfig:
        return self.config

    def leaves_out(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.excluded, self.without

    def answer(self, data: ClientData) -> Summary:
        """Rows to leave out are never read. Of classes with few rows left the answer is an empty cell."""
        rows, samples = data.client.train, data.sample_ids
        wanted, enough, out = self.cells(data)
        summary = summarize(data, self.cut, self.config, labels=enough, excluded=self.excluded)
        few = {label: frozenset(samples[out & (data.y[rows] == label)].tolist()) for label in wanted.keys() - enough}
        return replace(_with_empty(summary, few), rows=wanted)

    def cells(self, data: ClientData) -> tuple[dict[int, int], frozenset[int], Tensor]:
        """Classes that the answer names, and the rows of each; those with enough rows left; a mask of rows left out."""
        rows, samples = data.client.train, data.sample_ids
        out = torch.isin(samples, torch.tensor(sorted(self.excluded), dtype=samples.dtype, device=samples.device))
        held, kept = Counter(data.y[rows].tolist()), Counter(data.y[rows[~out]].tolist())
        wanted = {label: n for label, n in held.items() if n >= data.least_rows and self._asks_for(label)}
        return wanted, frozenset(label for label in wanted if not 0 < kept[label] < data.least_rows), out

    def _asks_for(self, label: int) -> bool:
        return label not in self.without and (self.labels is None or label in self.labels)

    def cells_in(self, details: Details) -> int:
        return cells_in_summary(details)

    def answer_message(self, answer: Summary) -> Message:
        return summary_message(answer, half=self.half)

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Summary:
        features = facts.features(self.cut)
        width = math.prod(features.shape)
        summary = read_summary(details, arrays, width=width, shape=features.shape, nonnegative=features.nonnegative)
        check_summary_classes(summary, self.without, self.labels, facts.num_classes)
        self._check_cells(summary)
        return summary

    def read_again(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Summary:
        features = facts.features(self.cut)
        width = math.prod(features.shape)
        return read_summary(details, arrays, width=width, shape=features.shape, nonnegative=features.nonnegative)

    def _check_cells(self, summary: Summary) -> None:
        """Rows, samples left out, centroids and the points behind them must add up in each cell."""
        require(summary.rows.keys() == set(summary.labels), "its rows and its centroids have different classes")
        points = [0, *accumulate(summary.counts.tolist())]  # behind all centroids so far
        ends = accumulate(summary.sizes)
        for label, size, ids, end in zip(summary.labels, summary.sizes, summary.excluded, ends, strict=True):
            named = frozenset(i for i in self.excluded if self.sample_labels.get(i, label) == label)
            require(ids <= named, "it leaves out samples that nobody named")
            require(ids >= named & self.sample_labels.keys(), "it does not leave out what was named")
            left = summary.rows[label] - len(ids)
            require(left >= 0, f"class {label} has fewer rows than are left out of it")
            hidden = not size and left > 0  # too few are left for the client's own rules
            require(not hidden or (bool(ids) and left <= _MOST_HELD_BACK), f"class {label} has rows and no centroids")
            expected = centroid_count(left, self.config.ratio)
            require(size in (0, expected), f"class {label} has {size} centroids, not {expected}")
            clustered = points[end] - points[end - size]
            require(not size or clustered == left, f"the points of class {label} are not as many as its rows")


def _with_empty(summary: Summary, empty: Mapping[int, frozenset[int]]) -> Summary:
    """The summary with cells that have too few rows left: the server must know that they are empty now."""
    cells = [*zip(summary.labels, summary.sizes, summary.excluded, strict=True)]
    cells = sorted([*cells, *((label, 0, ids) for label, ids in empty.items())], key=lambda cell: cell[0])
    labels, sizes, excluded = zip(*cells, strict=True) if cells else ((), (), ())
    return replace(summary, labels=labels, sizes=sizes, excluded=excluded)


def cells_in_summary(details: Details) -> int:
    """The number of cells in a summary, before it is checked."""
    return len(labels) if isinstance(labels := details.get("labels"), list) else 0


def summary_message(summary: Summary, *, half: bool = False) -> Message:
    """Centroids or noisy statistics as they are sent."""
    details: dict[str, Any] = {
        "labels": list(summary.labels),
        "sizes": list(summary.sizes),
        "excluded": [sorted(ids) for ids in summary.excluded],
        "rows": [[label, n] for label, n in sorted(summary.rows.items())],
        "nonnegative": summary.nonnegative,
        "shape": list(summary.shape),
        "paper_epsilons": list(summary.paper_epsilons),
    }
    return details, {"vectors": summary.vectors.half() if half else summary.vectors, "counts": summary.counts}


def read_summary(details: Details, arrays: Arrays, *, width: int, shape: tuple[int, ...], nonnegative: bool) -> Summary:
    """The inverse of `summary_message`; raises DataError if a part is out of shape."""
    labels, sizes = checks.whole_numbers(details, "labels"), checks.whole_numbers(details, "sizes")
    excluded = [checks.whole_set({"excluded": ids}, "excluded") for ids in checks.list_of(details, "excluded")]
    require(labels == sorted(set(labels)), "a class comes twice, or classes are out of order")
    require(len(sizes) == len(labels) == len(excluded), "its lists differ in length")
    require(all(size >= 0 for size in sizes), "a size is below 0")
    vectors = checks.floats(arrays, "vectors", (sum(sizes), width)).float()
    counts = checks.array(arrays, "counts", (sum(sizes),))
    require(counts.dtype in (torch.int32, torch.int64), "its counts are no whole numbers")
    require(bool(((counts >= 1) & (counts.long() < 2**31)).all()), "a count of points is out of range")
    require(checks.list_of(details, "shape") == list(shape), "its features have another shape")
    require(details.get("nonnegative") is nonnegative, "its features are of another kind")
    epsilons = checks.list_of(details, "paper_epsilons")
    numbers = all(type(value) in (int, float) and 0 <= value < _LARGEST for value in epsilons)
    require(numbers, "its epsilons are no numbers")
    require(len(epsilons) in (0, len(labels)), "its epsilons are of other cells")
    cells = checks.client_number(details), tuple(labels), tuple(sizes), tuple(excluded)
    rows = dict(checks.pairs(details, "rows"))
    return Summary(*cells, vectors, counts.int(), nonnegative, shape, tuple(map(float, epsilons)), rows)


def check_summary_classes(
    summary: Summary, without: frozenset[int], labels: frozenset[int] | None, num_classes: int
) -> None:
    """Raise unless an answer has the classes that were asked for."""
    require(all(0 <= label < num_classes for label in summary.labels), "a label is out of range")
    require(not without & set(summary.labels), "it tells of classes that nobody asked for")
    require(labels in (None, frozenset(summary.labels)), "it tells of other classes than were asked for")
