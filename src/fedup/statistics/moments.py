"""Statistics for an eraser: counts, sums and second moments, which add up over clients."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from torch import Tensor

LEAST_ROWS = 20  # fewest forgotten rows in a sum that leaves a client: fewer would nearly show the rows


@dataclass(frozen=True)
class AddsUp:
    """Figures that add up over batches, clients and requests, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Sums(AddsUp):
    """Count and sum of the features of some rows."""

    count: int
    sums: Tensor  # (P, C)

    @property
    def mean(self) -> Tensor:
        """(P, C)"""
        return self.sums / max(self.count, 1)


@dataclass(frozen=True)
class Moments(Sums):
    """Sums and second moments of features.

    >>> import torch
    >>> rows = torch.randn(10, 3, 4).double()
    >>> both = Moments.of(rows[:4]) + Moments.of(rows[4:])
    >>> torch.allclose(both.covariance, Moments.of(rows).covariance)
    True
    """

    squares: Tensor  # (P, C, C), or (P, C) for the diagonals alone

    @classmethod
    def of(cls, spread: Tensor, *, diagonal: bool = False) -> Self:
        """Of a batch of rows (N, P, C), in double precision."""
        if diagonal:
            return cls(len(spread), spread.sum(0).double(), spread.square().sum(0).double())
        by_position = spread.transpose(0, 1)  # (P, N, C)
        return cls(len(spread), spread.sum(0).double(), (by_position.mT @ by_position).double())

    @property
    def variance(self) -> Tensor:
        """Of each channel. (P, C)"""
        squares = self.squares if self.squares.ndim == 2 else self.squares.diagonal(dim1=1, dim2=2)
        return (squares / max(self.count, 1) - self.mean.square()).clamp(min=0)

    @property
    def covariance(self) -> Tensor:
        """(P, C, C)"""
        return self.squares / max(self.count, 1) - self.mean[:, :, None] * self.mean[:, None, :]


@dataclass(frozen=True)
class Shift(AddsUp):
    """The distance at a cut between forgotten rows and rows that look like them, position by position. All numbers are
    times the number of forgotten rows, so that they add up over requests."""

    rows: int  # forgotten
    distance: Tensor  # (P,) squared distance between the means
    noise: Tensor  # (P,) its expected value if there were no difference
    fisher: Tensor  # (P,) the same distance, each channel in units of its variance within the two sets
    variance: Tensor  # (P,) within the two sets, summed over channels


@dataclass(frozen=True)
class GroupStatistics:
    """What an eraser is made of: for each group the sums of its forgotten rows and of the rows compared with (whose
    counts are weights), and second moments of both kinds together."""

    forgotten: Mapping[str, Sums]
    reference: Mapping[str, Sums]
    pooled: Moments
