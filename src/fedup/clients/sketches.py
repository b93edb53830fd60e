"""Sketches of a client's forgotten rows by request, and of its retained ones by class, at the earliest cut."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.models.layout import Granularity
from fedup.statistics.eraser_statistics import (
    EVERY_CLASS,
    MOST_REFERENCE_ROWS,
    RowGroups,
    Sketches,
    shortened,
    sketch_groups,
)
from fedup.statistics.moments import Sums


@dataclass(frozen=True)
class SketchesQuestion(ExactQuestion[Sketches]):
    """The first question for an eraser: which retained cells look like the forgotten rows is found from its answers."""

    kind: ClassVar[str] = "sketch"
    reported_as: ClassVar[str] = "sketches of means"

    cut: str
    over: Granularity
    groups: RowGroups

    def answer(self, data: ClientData) -> Sketches:
        sketches = sketch_groups(data, self.cut, self.groups, self.over)
        least = min(data.least_rows, MOST_REFERENCE_ROWS)
        enough = {label: sums for label, sums in sketches.retained.items() if sums.count >= least}
        return replace(sketches, retained=enough)

    def answer_message(self, answer: Sketches) -> Message:
        kinds: dict[str, Mapping[Any, Sums]] = {"forgotten": answer.forgotten, "retained": answer.retained}
        arrays = {f"{kind}/{name}": sums.sums for kind, group in kinds.items() for name, sums in group.items()}
        return {kind: [[name, sums.count] for name, sums in group.items()] for kind, group in kinds.items()}, arrays

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Sketches:
        groups, size = shortened(torch.zeros(facts.layouts({self.cut: self.over})[self.cut])).shape

        def sums(name: str, count: int) -> Sums:
            require(0 < count < 2**53, "a count of rows is out of range")
            return Sums(count, checks.floats(arrays, name, (groups, size)))

        requests, cells = checks.pairs(details, "forgotten", named=True), checks.pairs(details, "retained")
        require({name for name, _ in requests} <= set(self.groups.requests), "it tells of a request that nobody named")
        require(all(EVERY_CLASS <= label < facts.num_classes for label, _ in cells), "a label is out of range")
        return Sketches(
            {name: sums(f"forgotten/{name}", count) for name, count in requests},
            {label: sums(f"retained/{label}", count) for label, count in cells},
        )
