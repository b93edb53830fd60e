"""Means and variances of a client's forgotten rows, and of its share of a mixture, at each cut."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError
from fedup.federation import named_rows
from fedup.models.layout import Granularity
from fedup.statistics.eraser_statistics import EVERY_CLASS, GroupSpreads, RowGroups, Spread, Weights, measure_groups


@dataclass(frozen=True)
class SpreadsQuestion(ExactQuestion[GroupSpreads]):
    """The second question for an eraser: where the forgotten rows stand apart is found from its answers."""

    kind: ClassVar[str] = "spreads"
    reported_as: ClassVar[str] = "means and variances"

    cuts: Mapping[str, Granularity]
    groups: RowGroups
    weights: Weights  # of the client's cells in each request's mixture

    def answer(self, data: ClientData) -> GroupSpreads:
        few = self._classes_with_few_rows(data)
        weights = {name: {label: w for label, w in of.items() if label not in few} for name, of in self.weights.items()}
        return measure_groups(data, self.cuts, self.groups, weights)

    def _classes_with_few_rows(self, data: ClientData) -> set[int]:
        """Classes of which the client retains fewer rows than it tells of; with all together where that is less."""
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
            require(all(_are_of(weights, self.cuts) for weights in groups.values()), "it tells of other cuts")
            spreads[kind] = {
                name: {cut: _spread(arrays, f"{kind}/{name}/{cut}", weights[cut], layouts[cut]) for cut in self.cuts}
                for name, weights in groups.items()
            }
        for name, cuts in spreads["reference"].items():
            share = sum(self.weights.get(name, {}).values())
            fits = all(own.weight <= share * (1 + 1e-6) + 1e-9 for own in cuts.values())
            require(fits, "it takes a larger share of the mixture than it was given")
        return GroupSpreads(spreads["forgotten"], spreads["reference"])


def _are_of(weights: object, cuts: Mapping[str, Granularity]) -> bool:
    return isinstance(weights, dict) and set(weights) == set(cuts)


def _spread(arrays: Arrays, name: str, weight: object, shape: tuple[int, int]) -> Spread:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 2**53:
        raise DataError("a weight is out of range")
    variance = checks.floats(arrays, f"{name}/variance", shape)
    require(bool((variance >= 0).all()), "a variance is below 0")
    return Spread(float(weight), checks.floats(arrays, f"{name}/mean", shape), variance)
