"""The guarantee: one joint Gaussian release of noisy counts, sums and second moments over data-independent cells.

One record (or subject) more or less changes a client's message by at most a stated l2 distance, whatever the data;
noise is calibrated to that distance exactly. docs/privacy.md has the statement in full.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedup.errors import DataError
from fedup.privacy.guarantee import DP
from fedup.rng import generator

_LARGEST_SPREAD = 200_000  # second moments in a message: above that only the diagonals are sent
_ROWS_AT_ONCE = 1024
_SHORTEST = 1e-12  # with clip="unit": the norm above which a vector is scaled to 1


@dataclass(frozen=True)
class Layout:
    """The parts of one class's vector: sums and counts of its cells, and its second moments."""

    dims: int
    cells: int
    full: bool  # second moments: all, or only their diagonal

    @classmethod
    def of(cls, dp: DP, dims: int, num_classes: int) -> "Layout":
        """The layout of all clients; it depends on public figures alone."""
        return cls(dims, dp.cells, full=num_classes * dims * (dims + 1) // 2 <= _LARGEST_SPREAD)

    @property
    def spread(self) -> int:
        """The number of second moments."""
        return self.dims * (self.dims + 1) // 2 if self.full else self.dims

    @property
    def size(self) -> int:
        """The length of the vector."""
        return self.cells * (self.dims + 1) + self.spread

    def split(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums (…, H, d), counts (…, H) and second moments (…, spread)."""
        sums, counts, spread = vectors.split([self.cells * self.dims, self.cells, self.spread], dim=-1)
        return sums.unflatten(-1, (self.cells, self.dims)), counts, spread

    def join(self, sums: Tensor, counts: Tensor, spread: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([sums.flatten(-2), counts, spread], dim=-1)

    def squares(self, points: Tensor) -> Tensor:
        """Second moments of points: one half of each symmetric matrix, scaled to its l2 norm. (N, spread)"""
        if not self.full:
            return points.square()
        row, column, weights = self._half()
        return points[:, row] * points[:, column] * weights

    def matrix(self, spread: Tensor) -> Tensor:
        """The matrices behind such vectors. (…, d, d)"""
        if not self.full:
            return torch.diag_embed(spread)
        row, column, weights = self._half()
        matrix = spread.new_zeros(*spread.shape[:-1], self.dims, self.dims)
        matrix[..., row, column] = matrix[..., column, row] = spread / weights.to(spread)
        return matrix

    def known(self, matrix: Tensor) -> Tensor:
        """The part of a matrix (d, d) that second moments determine: all of it, or its diagonal."""
        return matrix if self.full else torch.diag(matrix.diagonal())

    def _half(self) -> tuple[Tensor, Tensor, Tensor]:
        row, column = torch.triu_indices(self.dims, self.dims)
        return row, column, torch.where(row == column, 1.0, torch.tensor(math.sqrt(2), dtype=torch.float64))


def joint_vector(dp: DP, points: Tensor, labels: Tensor, subjects: Tensor | None, num_classes: int) -> Tensor:
    """A client's exact statistics, before noise: one vector for every class, held or not. (K, layout.size)

    `points` are projected features. One record more or less moves the whole by at most `dp.sensitivity`; with
    `subjects`, this bounds all records of one subject together. It holds for any rows: NaN and infinity count as 0, and
    a row with an unknown label adds nothing.
    """
    layout = Layout.of(dp, points.shape[1], num_classes)
    labels = labels.cpu().long()
    known = (labels >= 0) & (labels < num_classes)
    owner = checked_subjects(subjects, len(points))[known] if dp.unit == "subject" else None
    points, labels = clipped(points.double().cpu()[known], _SHORTEST if dp.clip == "unit" else dp.scale), labels[known]
    cell = multiply_in_batches(points, _directions(layout.dims, layout.cells)).argmax(1)
    if owner is None:  # each record alone is within the bound
        return _added_up(dp, layout, points, cell, labels, num_classes)
    total = torch.zeros(num_classes, layout.size, dtype=torch.float64)
    for rows in _chunks(owner):
        pairs, place = torch.stack([owner[rows], labels[rows]]).unique(dim=1, return_inverse=True)
        parts = _added_up(dp, layout, points[rows], cell[rows], place, pairs.shape[1])
        who = pairs[0].unique(return_inverse=True)[1]
        norms = torch.zeros(int(who.max()) + 1, dtype=torch.float64).index_add_(0, who, parts.square().sum(1))
        shorter = (dp.sensitivity / norms.sqrt().clamp(min=1e-300)).clamp(max=1)  # one norm for all classes together
        total.index_add_(0, pairs[1], parts * shorter[who][:, None])
    return total


def _added_up(dp: DP, layout: Layout, points: Tensor, cell: Tensor, place: Tensor, places: int) -> Tensor:
    """Sums, counts and second moments of the points that belong to each place. (places, layout.size)"""
    at = place * layout.cells + cell
    sums = torch.zeros(places * layout.cells, layout.dims, dtype=torch.float64).index_add_(0, at, points)
    counts = torch.bincount(at, minlength=len(sums)).double() * dp.count_weight
    spread = torch.zeros(places, layout.spread, dtype=torch.float64)
    for rows in torch.arange(len(points)).split(_ROWS_AT_ONCE):
        spread.index_add_(0, place[rows], layout.squares(points[rows]) * dp.spread_weight)
    return layout.join(sums.unflatten(0, (-1, layout.cells)), counts.unflatten(0, (-1, layout.cells)), spread)


def clipped(points: Tensor, norm: float) -> Tensor:
    """Points in units of a norm, longer ones shortened to 1; NaN and infinity count as 0. (N, d)

    A row is divided by its largest number before any square is taken, so that nothing overflows or vanishes: the result
    is never longer than 1, whatever the rows hold.

    >>> clipped(torch.tensor([[3e200, 4e200], [0.3, 0.4], [0.0, float("nan")]], dtype=torch.float64), 1.0).norm(dim=1)
    tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    points = finite(points)
    largest = points.abs().amax(1, keepdim=True)
    shape = points / torch.where(largest > 0, largest, 1.0)
    length = shape.norm(dim=1, keepdim=True)  # 1 or more, unless the row is 0
    return shape / length.clamp(min=1.0) * (length * largest / norm).clamp(max=1.0)


def finite(values: Tensor) -> Tensor:
    """Values with 0 in place of NaN and infinity."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def multiply_in_batches(points: Tensor, matrix: Tensor) -> Tensor:
    """`points @ matrix` in batches of one size: the last bits of a product depend on the number of rows, and the result
    of one row must not depend on how many others there are."""
    batches = [
        (nn.functional.pad(part, (0, 0, 0, _ROWS_AT_ONCE - len(part))) @ matrix)[: len(part)]
        for part in points.split(_ROWS_AT_ONCE)
    ]
    return torch.cat(batches) if batches else points @ matrix


def _directions(dims: int, cells: int) -> Tensor:
    """Public random directions; a point belongs to the cell of the direction that it goes furthest along."""
    return torch.randn(dims, cells, generator=generator(0, "cells", dims, cells), dtype=torch.float64)


def checked_subjects(subjects: Tensor | None, rows: int) -> Tensor:
    """The subject of each row, counted from 0; raises if a row has none. (rows,)"""
    if subjects is None or len(subjects) != rows:
        raise DataError("The unit is one subject, and rows have no subject ids: set them by Federation.with_subjects.")
    missing = int((subjects < 0).sum())
    if missing:
        raise DataError(f"{missing} of {rows} rows have no subject id: give each one, or protect records instead.")
    return subjects.cpu().unique(return_inverse=True)[1]


def _chunks(owner: Tensor) -> list[Tensor]:
    """Rows in pieces; all rows of an owner are in the same one."""
    order = owner.argsort(stable=True)
    sorted_owner = owner[order]
    last = sorted_owner[_ROWS_AT_ONCE - 1 :: _ROWS_AT_ONCE].contiguous()
    ends = torch.searchsorted(sorted_owner, last, right=True)
    return [piece for piece in order.tensor_split(ends.unique()) if len(piece)]


def release(dp: DP, exact: Tensor, *, name: tuple[Any, ...]) -> Tensor:
    """The message: every number with its noise. `name` is used only in test mode."""
    replay = (dp.replay_seed, f"{dp.sigma:g}", *name) if dp.is_replayable else None
    return (exact + dp.sigma * normal(exact.numel(), replay=replay).view_as(exact)).float()


def normal(size: int, *, replay: tuple[object, ...] | None = None) -> Tensor:
    """Independent standard normal numbers in double precision, which nobody can replay. (size,)

    Each is made of 128 fresh bits of the system's entropy. `replay` names a seeded stream: anyone who knows it can
    subtract the noise, nothing is protected, and every report must say so.
    """
    if replay is not None:
        return torch.randn(size, generator=generator(0, "replayable noise", *replay), dtype=torch.float64)
    bits = np.frombuffer(secrets.token_bytes(16 * size), dtype=np.uint64).reshape(2, size)
    radius, angle = (bits >> 11).astype(np.float64) * 2.0**-53  # in [0, 1)
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle))  # Box & Muller 1958
