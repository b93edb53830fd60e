"""The questions for an eraser: three in a row, each based on the answers before; under differential privacy one release
instead."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message, PrivateQuestion
from fedup.errors import DataError
from fedup.federation import named_rows
from fedup.models.features import FeatureReader
from fedup.models.layout import Granularity
from fedup.privacy.guarantee import DP
from fedup.statistics import eraser_statistics
from fedup.statistics.eraser_statistics import EVERY_CLASS, GroupSpreads, RowGroups, Sketches, Spread, Weights
from fedup.statistics.moments import LEAST_ROWS, Moments, Sums
from fedup.statistics.private_erasure import NoisyStatistics, PlannedStatistics

_LARGEST_CLIP = 1e12


@dataclass(frozen=True)
class SketchesQuestion(ExactQuestion[Sketches]):
    """The first question for an eraser: its answers show which retained cells look like the forgotten rows."""

    kind: ClassVar[str] = "sketch"
    reported_as: ClassVar[str] = "sketches of means"

    cut: str
    over: Granularity
    groups: RowGroups

    def answer(self, data: ClientData) -> Sketches:
        sketches = eraser_statistics.sketch_groups(data, self.cut, self.groups, self.over)
        least = min(data.least_rows, eraser_statistics.MOST_REFERENCE_ROWS)
        enough = {label: sums for label, sums in sketches.retained.items() if sums.count >= least}
        return replace(sketches, retained=enough)

    def answer_message(self, answer: Sketches) -> Message:
        kinds: dict[str, Mapping[Any, Sums]] = {"forgotten": answer.forgotten, "retained": answer.retained}
        arrays = {f"{kind}/{name}": sums.sums for kind, group in kinds.items() for name, sums in group.items()}
        return {kind: [[name, sums.count] for name, sums in group.items()] for kind, group in kinds.items()}, arrays

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Sketches:
        groups, size = eraser_statistics.shortened(torch.zeros(facts.layouts({self.cut: self.over})[self.cut])).shape

        def sums(name: str, count: int) -> Sums:
            require(0 < count < 2**53, "a count of rows is out of range")
            return Sums(count, checks.floats(arrays, name, (groups, size)))

        requests, cells = checks.pairs(details, "forgotten", named=True), checks.pairs(details, "retained")
        require({name for name, _ in requests} <= set(self.groups.requests), "it names a request that nobody sent")
        require(all(EVERY_CLASS <= label < facts.num_classes for label, _ in cells), "a label is out of range")
        return Sketches(
            {name: sums(f"forgotten/{name}", count) for name, count in requests},
            {label: sums(f"retained/{label}", count) for label, count in cells},
        )


@dataclass(frozen=True)
class SpreadsQuestion(ExactQuestion[GroupSpreads]):
    """The second question for an eraser: its answers show where the forgotten rows stand apart."""

    kind: ClassVar[str] = "spreads"
    reported_as: ClassVar[str] = "means and variances"

    cuts: Mapping[str, Granularity]
    groups: RowGroups
    weights: Weights  # of the client's cells in each request's mixture

    def answer(self, data: ClientData) -> GroupSpreads:
        return eraser_statistics.measure_groups(data, self.cuts, self.groups, self.weights_used(data))

    def weights_used(self, data: ClientData) -> Weights:
        """The weights, without classes that have too few rows."""
        few = self._classes_with_few_rows(data)
        return {name: {label: w for label, w in of.items() if label not in few} for name, of in self.weights.items()}

    def _classes_with_few_rows(self, data: ClientData) -> set[int]:
        """Classes with fewer retained rows than the client may send; EVERY_CLASS if all together are too few."""
        kept = data.y[named_rows(data.client, self.groups.forget_set, data.client.train, data.y)[1]]
        rows = {**Counter(kept.tolist()), EVERY_CLASS: len(kept)}
        return {label for label, n in rows.items() if n < data.least_rows}

    def answer_message(self, answer: GroupSpreads) -> Message:
        details: dict[str, Any] = {}
        arrays: dict[str, Tensor] = {}
        for kind, groups in (("forgotten", answer.forgotten), ("reference", answer.reference)):
            details[kind] = {name: {cut: own.weight for cut, own in cuts.items()} for name, cuts in groups.items()}
            for name, cuts in groups.items():
                for cut, own in cuts.items():
                    arrays |= {f"{kind}/{name}/{cut}/mean": own.mean, f"{kind}/{name}/{cut}/variance": own.variance}
        return details, arrays

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> GroupSpreads:
        layouts, spreads = facts.layouts(self.cuts), {}
        for kind in ("forgotten", "reference"):
            groups = checks.by_request(details, kind, set(self.groups.requests))
            fits = all(isinstance(weights, dict) and set(weights) == set(self.cuts) for weights in groups.values())
            require(fits, "it has other cuts than were asked for")
            spreads[kind] = {
                name: {cut: _spread(arrays, f"{kind}/{name}/{cut}", weights[cut], layouts[cut]) for cut in self.cuts}
                for name, weights in groups.items()
            }
        few = any(own.weight < LEAST_ROWS for cuts in spreads["forgotten"].values() for own in cuts.values())
        require(not few, f"it is about fewer than {LEAST_ROWS} forgotten rows")
        for name, cuts in spreads["reference"].items():
            share = sum(self.weights.get(name, {}).values())
            fits = all(own.weight <= share * (1 + 1e-6) + 1e-9 for own in cuts.values())
            require(fits, "it takes a larger share of the mixture than it was given")
        return GroupSpreads(spreads["forgotten"], spreads["reference"])


def _spread(arrays: Arrays, name: str, weight: object, shape: tuple[int, int]) -> Spread:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 2**53:
        raise DataError("a weight is out of range")
    variance = checks.floats(arrays, f"{name}/variance", shape)
    require(bool((variance >= 0).all()), "a variance is below 0")
    return Spread(float(weight), checks.floats(arrays, f"{name}/mean", shape), variance)


@dataclass(frozen=True)
class SecondMomentsQuestion(ExactQuestion[Moments | None]):
    """The third question for an eraser, at the chosen site; None if the client has too few rows."""

    kind: ClassVar[str] = "moments"
    reported_as: ClassVar[str] = "second moments"

    cut: str
    over: Granularity
    positions: tuple[int, ...]
    groups: RowGroups

    def answer(self, data: ClientData) -> Moments | None:
        if len(set(self.positions)) < len(self.positions):  # the answer would be of any size
            raise DataError("A position is asked for twice.")
        moments = eraser_statistics.second_moments(
            data, self.cut, self.groups, granularity=self.over, positions=self.positions
        )
        if moments is None:
            return None
        squares = whole_of(half_of(moments.squares), moments.sums.shape[1])  # as if one half had been sent
        return Moments(moments.count, moments.sums, squares)

    def answer_message(self, answer: Moments | None) -> Message:
        """Only one half of a symmetric matrix is sent."""
        if answer is None:
            return {"none": True}, {}
        return {"none": False, "count": answer.count}, {"sums": answer.sums, "squares": half_of(answer.squares)}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Moments | None:
        if details.get("none") is True:
            return None
        channels = facts.layouts({self.cut: self.over})[self.cut][1]
        half = checks.floats(arrays, "squares", (len(self.positions), channels * (channels + 1) // 2))
        count = details.get("count")
        if type(count) is not int or not 0 < count < 2**53:
            raise DataError("a count of rows is out of range")
        sums = checks.floats(arrays, "sums", (len(self.positions), channels))
        return Moments(count, sums, whole_of(half, channels))


def half_of(squares: Tensor) -> Tensor:
    """The upper triangle of symmetric matrices, row by row. (P, C, C) to (P, C (C + 1) / 2)"""
    row, column = torch.triu_indices(squares.shape[-1], squares.shape[-1], device=squares.device)
    return squares[..., row, column]


def whole_of(half: Tensor, channels: int) -> Tensor:
    """The inverse of `half_of`, symmetric to the bit."""
    row, column = torch.triu_indices(channels, channels, device=half.device)
    squares = half.new_empty(*half.shape[:-1], channels, channels)
    squares[..., row, column] = squares[..., column, row] = half
    return squares


@dataclass(frozen=True)
class PrivateEraserQuestion(PrivateQuestion[NoisyStatistics, PlannedStatistics]):
    """Noisy sums and squares at all positions of a cut."""

    kind: ClassVar[str] = "gather privately"
    reported_as: ClassVar[str] = "statistics under DP"
    charged_as: ClassVar[str] = "eraser"

    cut: str
    dp: DP
    groups: RowGroups

    def plan(
        self, model: nn.Module, blank: Tensor, num_classes: int, reader: FeatureReader | None = None
    ) -> PlannedStatistics:
        return PlannedStatistics(model, blank, cut=self.cut, dp=self.dp, num_classes=num_classes)

    def release(self, plan: PlannedStatistics, data: ClientData) -> NoisyStatistics:
        return plan.answer(data, self.groups)

    def answer_message(self, answer: NoisyStatistics) -> Message:
        return {"clip": answer.clip}, {"sums": answer.sums, "counts": answer.counts}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> NoisyStatistics:
        clip = details.get("clip")
        if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < _LARGEST_CLIP:
            raise DataError("its clip is no positive number, or too large for features")
        sums, counts = checks.floats(arrays, "sums", None), checks.floats(arrays, "counts", None)
        groups = len(counts.flatten()) - 1  # retained rows by class, or all together if that is too much
        require(groups in (1, facts.num_classes) and counts.ndim == 1, "its counts belong to other groups")
        layout = facts.layouts({self.cut: "each"})[self.cut]
        require(tuple(sums.shape) == (groups + 2, *layout), f"sums is of shape {tuple(sums.shape)}")
        return NoisyStatistics(sums, counts, float(clip))
