"""A client's second moments at some positions of a cut."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedup.clients import checks
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError
from fedup.models.layout import Granularity
from fedup.request import Forget
from fedup.statistics.eraser_statistics import RowGroups, second_moments
from fedup.statistics.moments import Moments


@dataclass(frozen=True)
class SecondMomentsQuestion(ExactQuestion[Moments | None]):
    """The third question for an eraser, at the place that was chosen; None where the client has too few rows."""

    kind: ClassVar[str] = "moments"
    reported_as: ClassVar[str] = "second moments"

    cut: str
    over: Granularity
    positions: tuple[int, ...]
    groups: RowGroups

    def to_message(self) -> Message:
        at = {"cut": self.cut, "over": self.over, "positions": list(self.positions)}
        return {**at, "question": self.groups.to_json()}, {}

    @classmethod
    def from_message(cls, details: Details, arrays: Arrays) -> Self:
        groups = RowGroups.from_json(details["question"])
        return cls(details["cut"], details["over"], tuple(details["positions"]), groups)

    def with_places(self, places: Callable[[Forget], Forget]) -> Self:
        return replace(self, groups=self.groups.with_places(places))

    def answer(self, data: ClientData) -> Moments | None:
        found = second_moments(data, self.cut, self.groups, granularity=self.over, positions=self.positions)
        return None if found is None else _symmetric(found)

    def answer_message(self, answer: Moments | None) -> Message:
        """Of a symmetric matrix one half is sent."""
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
    """Of symmetric matrices the upper triangle, row by row. (P, C, C) to (P, C (C + 1) / 2)"""
    one, other = torch.triu_indices(squares.shape[-1], squares.shape[-1], device=squares.device)
    return squares[..., one, other]


def whole_of(half: Tensor, channels: int) -> Tensor:
    """The opposite of `half_of`, symmetric to the bit."""
    one, other = torch.triu_indices(channels, channels, device=half.device)
    squares = half.new_empty(*half.shape[:-1], channels, channels)
    squares[..., one, other] = half
    squares[..., other, one] = half
    return squares


def _symmetric(found: Moments) -> Moments:
    """With matrices that are symmetric to the bit, as they are where one half of them was sent."""
    return Moments(found.count, found.sums, whole_of(half_of(found.squares), found.sums.shape[1]))
