"""A client's second moments at some positions of a cut."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedup.clients import checks
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError
from fedup.models.layout import Granularity
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

    def answer(self, data: ClientData) -> Moments | None:
        moments = second_moments(data, self.cut, self.groups, granularity=self.over, positions=self.positions)
        if moments is None:
            return None
        squares = whole_of(half_of(moments.squares), moments.sums.shape[1])  # as where one half of them was sent
        return Moments(moments.count, moments.sums, squares)

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
    row, column = torch.triu_indices(squares.shape[-1], squares.shape[-1], device=squares.device)
    return squares[..., row, column]


def whole_of(half: Tensor, channels: int) -> Tensor:
    """The opposite of `half_of`, symmetric to the bit."""
    row, column = torch.triu_indices(channels, channels, device=half.device)
    squares = half.new_empty(*half.shape[:-1], channels, channels)
    squares[..., row, column] = squares[..., column, row] = half
    return squares
