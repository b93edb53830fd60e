"""Sketches of a client's forgotten rows by request, and of its retained ones by class, at the earliest cut."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.models.layout import Granularity
from fedup.request import Forget
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

    def to_message(self) -> Message:
        return {"cut": self.cut, "over": self.over, "question": self.groups.to_json()}, {}

    @classmethod
    def from_message(cls, details: Details, arrays: Arrays) -> Self:
        return cls(details["cut"], details["over"], RowGroups.from_json(details["question"]))

    def with_places(self, places: Callable[[Forget], Forget]) -> Self:
        return replace(self, groups=self.groups.with_places(places))

    def answer(self, data: ClientData) -> Sketches:
        found = sketch_groups(data, self.cut, self.groups, self.over)
        least = min(data.least_rows, MOST_REFERENCE_ROWS)
        return replace(found, retained={label: one for label, one in found.retained.items() if one.count >= least})

    def answer_message(self, answer: Sketches) -> Message:
        arrays = {f"forgotten/{name}": one.sums for name, one in answer.forgotten.items()}
        arrays |= {f"retained/{label}": one.sums for label, one in answer.retained.items()}
        counts = {
            "forgotten": [[name, one.count] for name, one in answer.forgotten.items()],
            "retained": [[label, one.count] for label, one in answer.retained.items()],
        }
        return counts, arrays

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Sketches:
        groups, size = shortened(torch.zeros(facts.layouts({self.cut: self.over})[self.cut])).shape

        def sums(name: str, count: int) -> Sums:
            require(0 < count < 2**53, "a count of rows is out of range")
            return Sums(count, checks.floats(arrays, name, (groups, size)))

        told, cells = checks.named_counts(details, "forgotten"), checks.pairs(details, "retained")
        require({name for name, _ in told} <= set(self.groups.requests), "it tells of a request that nobody named")
        require(all(EVERY_CLASS <= label < facts.num_classes for label, _ in cells), "a label is out of range")
        return Sketches(
            {name: sums(f"forgotten/{name}", count) for name, count in told},
            {label: sums(f"retained/{label}", count) for label, count in cells},
        )
