"""Retained rows anywhere in the federation that look like forgotten ones: a mixture of cells."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedup.statistics.eraser_statistics import Sketches, Spread
from fedup.statistics.mixture import robust_mixture
from fedup.statistics.moments import Shift, Sums

MOST_CELLS = 512  # of a mixture; beyond, cells of clients without forgotten rows are joined by class


@dataclass(frozen=True)
class _Cell:
    """Retained rows of one class at one client, or joined over several: {client: share of the rows}."""

    holders: Mapping[int, float]
    label: int
    sums: Sums

    def __add__(self, other: "_Cell") -> "_Cell":
        sums = self.sums + other.sums
        mine, theirs = self.sums.count / sums.count, other.sums.count / sums.count
        holders = {client: mine * share for client, share in self.holders.items()}
        return _Cell(holders | {client: theirs * share for client, share in other.holders.items()}, self.label, sums)


@dataclass(frozen=True)
class Mixture:
    """Weights of cells that together look most like some forgotten rows."""

    weights: Mapping[tuple[int, int], float]  # by client and class
    chance: float  # Σ weight² / rows: the variance of its mean over that of a row

    @classmethod
    def nearest(cls, mean: Tensor, cells: Sequence[_Cell]) -> "Mixture":
        """The mixture of the cells that comes closest to a mean."""
        shares = robust_mixture(mean, [cell.sums.sums.double() / cell.sums.count for cell in cells]).tolist()
        weights = {
            (client, cell.label): share * part
            for share, cell in zip(shares, cells, strict=True)
            if share > 0
            for client, part in cell.holders.items()
        }
        return cls(weights, sum(share**2 / cell.sums.count for share, cell in zip(shares, cells, strict=True)))

    @property
    def clients(self) -> set[int]:
        """The clients whose rows are in it."""
        return {client for client, _ in self.weights}

    def of(self, client: int) -> dict[int, float]:
        """The weights of one client's classes."""
        return {label: weight for (holder, label), weight in self.weights.items() if holder == client}


def retained_cells(sketches: Mapping[int, Sketches], touched: Collection[int]) -> list[_Cell]:
    """All retained cells; beyond `MOST_CELLS`, those of clients without forgotten rows are joined by class."""
    cells = [
        _Cell({client: 1.0}, label, sums)
        for client, sketch in sketches.items()
        for label, sums in sketch.retained.items()
    ]
    if len(cells) <= MOST_CELLS:
        return cells
    joined: dict[int, _Cell] = {}
    own = []
    for cell in cells:
        if cell.holders.keys() <= set(touched):
            own.append(cell)
        else:
            joined[cell.label] = joined[cell.label] + cell if cell.label in joined else cell
    return [*own, *joined.values()]


def shift_between(forgotten: Spread, reference: Spread, chance: float) -> Shift:
    """The distance of the two means; `chance` is the variance of the reference's mean over that of a row."""
    rows, there, like = round(forgotten.weight), forgotten.average, reference.average
    distance = (there.mean - like.mean).square()  # (P, C)
    both = rows + 1 / max(chance, 1e-12)
    within = (rows * there.variance + like.variance / max(chance, 1e-12)) / both
    floor = 0.01 * within.mean() + 1e-12  # a channel that never changes is not infinitely telling
    noise = within * (1 / rows + chance)
    parts = distance, noise, distance / (within + floor), within
    return Shift(rows, *((rows * part.sum(1)).float() for part in parts))


def sums_at(spread: Spread, positions: Tensor, rows: float, device: torch.device) -> Sums:
    """A group's mean at some positions, as the sums of `rows` rows."""
    return Sums(round(rows), (rows * spread.average.mean[positions]).to(device))
