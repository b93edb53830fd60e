"""The guarantee: one joint Gaussian release of noisy counts, sums and second moments over data-independent cells.

One record (or subject) more or less changes a client's message by at most a stated l2 distance, whatever the data;
noise is calibrated to that distance exactly. docs/privacy.md has the statement in full.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedup.errors import DataError, SettingError
from fedup.privacy.accountant import LARGEST_EPSILON, mu_of
from fedup.privacy.noise import normal
from fedup.privacy.projection import PROJECTIONS, ProjectionName
from fedup.rng import generator

Unit = Literal["record", "subject"]
LARGEST_DELTA = 1e-5
_LARGEST_SPREAD = 200_000  # numbers of second moments a message: above that only the diagonals are sent
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class DP:
    """(ε, δ)-differential privacy of each client's message, for one record, or all records of one subject.

    `clip` is the l2 norm that a projected feature vector may have: a public number, or "unit", which scales
    each vector to norm 1 and so needs no look at the data. `cells` splits each class by fixed random directions.
    `count_weight` and `spread_weight` say how precise counts and second moments are against sums.

    `replay_seed` makes the noise replayable, for tests: nothing is protected then, and every report says so.

    >>> round(DP(1.0, clip="unit").sigma, 2)  # of noise on sums of vectors of norm 1
    5.6
    """

    epsilon: float
    delta: float = 1e-5
    clip: float | Literal["unit"] | None = None
    unit: Unit = "record"
    projection: ProjectionName = "auto"
    dims: int = 128
    cells: int = 1
    count_weight: float = 0.5
    spread_weight: float = 1.0
    allow_delta: bool = False
    replay_seed: int | None = None

    def __post_init__(self) -> None:
        for name, value in {"epsilon": self.epsilon, "delta": self.delta}.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SettingError(f"{name} must be a number; found {value!r}.")
        if not 0 < self.epsilon <= LARGEST_EPSILON:
            raise SettingError(f"epsilon must be above 0 and at most {LARGEST_EPSILON:.0f}; found {self.epsilon}.")
        if not 0 < self.delta < 1:
            raise SettingError(f"delta must lie strictly between 0 and 1; found {self.delta}.")
        if self.delta > LARGEST_DELTA and not self.allow_delta:
            raise SettingError(
                f"delta {self.delta:g} is above {LARGEST_DELTA:g}: with so much, records may be published outright. "
                "Use a smaller one, or say that you mean it (allow_delta=True, --allow-delta)."
            )
        if self.clip is None:
            raise SettingError(
                "clip is missing: pass the l2 norm that feature vectors are clipped to, a public number that was not "
                "read off the data, or clip='unit', which scales each vector to norm 1 and needs none."
            )
        if self.clip != "unit" and not (isinstance(self.clip, int | float) and 0 < self.clip < math.inf):
            raise SettingError(f"clip must be 'unit' or a number above 0; found {self.clip!r}.")
        if self.unit not in ("record", "subject"):
            raise SettingError(f"unit is 'record' or 'subject'; found {self.unit!r}.")
        if self.projection not in PROJECTIONS:
            raise SettingError(f"projection is one of {', '.join(PROJECTIONS)}; found {self.projection!r}.")
        for name, number in {"dims": self.dims, "cells": self.cells}.items():
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 4096:
                raise SettingError(f"{name} must be a whole number from 1 to 4096; found {number!r}.")
        if not (0 < self.count_weight < math.inf and 0 < self.spread_weight < math.inf):
            raise SettingError(
                f"count_weight and spread_weight must be above 0; found {self.count_weight} and {self.spread_weight}."
            )

    @property
    def mu(self) -> float:
        """What a release costs, in μ-GDP."""
        return mu_of(self.epsilon, self.delta)

    @property
    def sensitivity(self) -> float:
        """The largest l2 distance by which one record, or subject, changes the joint vector (in units of the clip)."""
        return math.hypot(1.0, self.count_weight, self.spread_weight)

    @property
    def sigma(self) -> float:
        """Deviation of the noise on every number of the joint vector."""
        return self.sensitivity / self.mu

    @property
    def is_replayable(self) -> bool:
        """Whether the noise can be replayed, so that nothing is protected: for tests alone."""
        return self.replay_seed is not None

    @property
    def mechanism(self) -> str:
        """What protects a message, in words."""
        return str(self)

    def __str__(self) -> str:
        told = f"(ε = {self.epsilon:g}, δ = {self.delta:g})-DP for one {self.unit}"
        return f"TEST MODE, replayable noise, NO PRIVACY: {told} in form only" if self.is_replayable else told

    @property
    def scale(self) -> float:
        """The norm that joint vectors are measured in."""
        return 1.0 if self.clip == "unit" or self.clip is None else float(self.clip)


@dataclass(frozen=True)
class Layout:
    """What stands where in the vector that tells of one class: sums and counts of its cells, its second moments."""

    dims: int
    cells: int
    full: bool  # second moments: all, or only their diagonal

    @classmethod
    def of(cls, dp: DP, dims: int, num_classes: int) -> "Layout":
        """The same for all clients: it depends on public figures alone."""
        return cls(dims, dp.cells, full=num_classes * dims * (dims + 1) // 2 <= _LARGEST_SPREAD)

    @property
    def spread(self) -> int:
        """Numbers of second moments."""
        return self.dims * (self.dims + 1) // 2 if self.full else self.dims

    @property
    def size(self) -> int:
        """Numbers in all."""
        return self.cells * (self.dims + 1) + self.spread

    def split(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums (…, H, d), counts (…, H) and second moments (…, spread)."""
        sums, counts, spread = vectors.split([self.cells * self.dims, self.cells, self.spread], dim=-1)
        return sums.unflatten(-1, (self.cells, self.dims)), counts, spread

    def join(self, sums: Tensor, counts: Tensor, spread: Tensor) -> Tensor:
        """The opposite of `split`."""
        return torch.cat([sums.flatten(-2), counts, spread], dim=-1)

    def squares(self, points: Tensor) -> Tensor:
        """Second moments of points as vectors of the same l2 norm: of a symmetric matrix one half. (N, spread)"""
        if not self.full:
            return points.square()
        one, other, weights = self._half()
        return points[:, one] * points[:, other] * weights

    def matrix(self, spread: Tensor) -> Tensor:
        """The matrices behind such vectors. (…, d, d)"""
        if not self.full:
            return torch.diag_embed(spread)
        one, other, weights = self._half()
        made = spread.new_zeros(*spread.shape[:-1], self.dims, self.dims)
        made[..., one, other] = made[..., other, one] = spread / weights.to(spread)
        return made

    def _half(self) -> tuple[Tensor, Tensor, Tensor]:
        one, other = torch.triu_indices(self.dims, self.dims)
        return one, other, torch.where(one == other, 1.0, math.sqrt(2)).double()


def joint_vector(dp: DP, points: Tensor, labels: Tensor, subjects: Tensor | None, num_classes: int) -> Tensor:
    """A client's exact statistics, before noise: one vector for every class, held or not. (K, layout.size)

    `points` are projected features. One record more or less moves the whole by at most `dp.sensitivity`; with
    `subjects`, all records of one subject together do.
    """
    layout = Layout.of(dp, points.shape[1], num_classes)
    points = _clipped(points.double().cpu(), dp)
    labels = labels.cpu()
    cell = (points @ _directions(layout.dims, layout.cells)).argmax(1)
    owner = torch.arange(len(points)) if dp.unit == "record" else _checked_subjects(subjects, len(points))
    total = torch.zeros(num_classes, layout.size, dtype=torch.float64)
    for rows in _chunks(owner):
        parts, who, label = _contributions(dp, layout, points[rows], cell[rows], labels[rows], owner[rows])
        if dp.unit == "subject":  # of all classes together, one norm
            norms = torch.zeros(int(who.max()) + 1, dtype=torch.float64).index_add_(0, who, parts.square().sum(1))
            parts = parts * (dp.sensitivity / norms.sqrt().clamp(min=1e-300)).clamp(max=1)[who][:, None]
        total.index_add_(0, label, parts)
    return total


def _contributions(
    dp: DP, layout: Layout, points: Tensor, cell: Tensor, labels: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each owner adds to each class: vectors, whose, to which class."""
    pairs, place = torch.stack([owner, labels]).unique(dim=1, return_inverse=True)
    sums = torch.zeros(pairs.shape[1] * layout.cells, layout.dims, dtype=torch.float64)
    sums.index_add_(0, place * layout.cells + cell, points)
    counts = torch.bincount(place * layout.cells + cell, minlength=len(sums)).double() * dp.count_weight
    spread = torch.zeros(pairs.shape[1], layout.spread, dtype=torch.float64)
    spread.index_add_(0, place, layout.squares(points) * dp.spread_weight)
    parts = layout.join(sums.unflatten(0, (-1, layout.cells)), counts.unflatten(0, (-1, layout.cells)), spread)
    return parts, pairs[0].unique(return_inverse=True)[1], pairs[1]


def _clipped(points: Tensor, dp: DP) -> Tensor:
    """Points in units of the clip: none is longer than 1."""
    if not bool(points.isfinite().all()):
        raise DataError("Some features are NaN or infinite: nothing was released. Check the model and the inputs.")
    norms = points.norm(dim=1, keepdim=True)
    if dp.clip == "unit":
        return points / norms.clamp(min=1e-12)
    return points / norms.clamp(min=dp.scale)


def _directions(dims: int, cells: int) -> Tensor:
    """Public random directions; a point's cell is the one it goes furthest along."""
    return torch.randn(dims, cells, generator=generator(0, "cells", dims, cells), dtype=torch.float64)


def _checked_subjects(subjects: Tensor | None, rows: int) -> Tensor:
    if subjects is None or len(subjects) != rows:
        raise DataError("The unit is one subject, and rows have no subject ids: pass subjects=… to Federation.split.")
    missing = int((subjects < 0).sum())
    if missing:
        raise DataError(f"{missing} of {rows} rows have no subject id: give each one, or protect records instead.")
    return subjects.cpu().unique(return_inverse=True)[1]


def _chunks(owner: Tensor) -> list[Tensor]:
    """Rows in pieces that never part one owner's."""
    order = owner.argsort(stable=True)
    sorted_owner = owner[order]
    last = sorted_owner[_ROWS_AT_ONCE - 1 :: _ROWS_AT_ONCE].contiguous()
    ends = torch.searchsorted(sorted_owner, last, right=True)
    return [piece for piece in order.tensor_split(ends.unique()) if len(piece)]


def release(dp: DP, exact: Tensor, *, name: tuple[Any, ...]) -> Tensor:
    """The message: every number with its noise. `name` is used in test mode alone."""
    replay = (dp.replay_seed, *name) if dp.is_replayable else None
    return (exact + dp.sigma * normal(exact.numel(), replay=replay).view_as(exact)).float()
