"""Counts, sums and second moments of features as integers: they add up, and subtract, exactly in any order."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError, SettingError, check_choice
from fedup.targets import Targets, kind_of

ByClass = Literal["auto", "always", "never"]
_EXACT = 2.0**52  # sums of integers below this are exact in double precision
_LARGEST_TOTAL = 2**62  # of an entry of a total: 64 bits hold it, and the sum of two
MOST_STEPS = 2**20  # steps of the grid within the bound, so that blocks of 4,096 rows are exact
_NARROW = (
    512  # features, up to which an index of the whole matrix is kept: clients' moments are unpacked by the thousand
)
_SLOW, _BORDER = 128, 4  # LAPACK takes twice as long to factor a matrix whose size is a multiple of 128 as a larger one
VALUE_STEPS = 2**16  # steps of the grid of values within their bound


@dataclass(frozen=True)
class MomentConfig:
    """How features become integers, the same for all clients.

    A row of features longer than `bound` (l2 norm) is shortened to it. Each number is rounded towards zero to a
    multiple of `step`. A client leaves out a class of which it has fewer than `least_rows` rows: second moments of few
    rows come close to the rows. It treats a change of fewer rows alike (`retained_mask`). `by_class` says whether
    clients send second moments of each class ahead of requests. Without them a class request asks its holders.

    Where the model learns labels or values (`targets`), its `outputs` targets are further columns of a row: all rows of
    a client are one cell, and second moments hold the products of features and targets, too. Values are rounded to
    one of 65,536 steps within `value_bound`; larger ones are cut off there. `collect` fills in targets and outputs.
    """

    bound: float = field(default=256.0, metadata={"help": "Longest row of features (l2); longer ones are shortened."})
    step: float = field(default=0.03125, metadata={"help": "Features are rounded to multiples of this."})
    least_rows: int = field(default=5, metadata={"help": "Fewest rows of a class that a client reports.", "min": 1})
    by_class: ByClass = field(
        default="auto",
        metadata={"help": "Second moments by class ahead of requests: always, never, or auto (where they are small)."},
    )
    value_bound: float = field(default=256.0, metadata={"help": "Largest value to learn; larger ones are cut off."})
    targets: Targets = "classes"
    outputs: int = 0  # columns of targets; none for classes

    sigma: ClassVar[float] = 0.0
    mechanism: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        if not 0 < self.bound < float("inf") or not 0 < self.step < float("inf"):
            raise SettingError(f"bound and step must be positive numbers; found {self.bound} and {self.step}.")
        if not 1 <= self.bound / self.step <= MOST_STEPS:
            raise SettingError(
                f"bound must be 1 to {MOST_STEPS:,} steps; found {self.bound:g} / {self.step:g}. Use a larger step."
            )
        if not isinstance(self.least_rows, int) or self.least_rows < 1:
            raise SettingError(f"least_rows must be a whole number, 1 or more; found {self.least_rows!r}.")
        check_choice("by_class", self.by_class, ByClass)
        check_choice("targets", self.targets, Targets)
        if not 0 < self.value_bound < float("inf"):
            raise SettingError(f"value_bound must be a positive number; found {self.value_bound}.")
        if not isinstance(self.outputs, int) or (self.outputs > 0) != (self.targets != "classes"):
            raise SettingError(f"{self.targets} with {self.outputs} columns of targets: leave both to collect().")

    @property
    def is_usual_grid(self) -> bool:
        """Whether nobody chose bound or step, so that another grid may be tried that suits the features better."""
        return (self.bound, self.step) == (MomentConfig.bound, MomentConfig.step)

    def adapted_as(self, other: "MomentConfig") -> "MomentConfig":
        """The same, with what a collection chose for itself where nobody did: grids and targets."""
        adapted = replace(self, targets=other.targets, outputs=other.outputs)
        if self.is_usual_grid:
            adapted = replace(adapted, bound=other.bound, step=other.step)
        return replace(adapted, value_bound=other.value_bound) if self.is_usual_value_bound else adapted

    @property
    def is_usual_value_bound(self) -> bool:
        """Whether nobody chose the bound of values."""
        return self.value_bound == MomentConfig.value_bound

    @cached_property
    def limit(self) -> float:
        """The longest row of integers, in steps: features, and targets beside them."""
        of_targets = {"classes": 0, "labels": 1, "values": VALUE_STEPS}[self.targets]
        return math.hypot(self.bound / self.step, self.outputs**0.5 * of_targets)

    @property
    def value_step(self) -> float:
        """What one step of a target means."""
        return self.value_bound / VALUE_STEPS if self.targets == "values" else 1.0

    def cells(self, num_classes: int) -> int:
        """Kinds of cells: one for each class; with other targets one more, the last, which holds all rows."""
        return num_classes + (self.targets != "classes")

    @property
    def most_rows(self) -> int:
        """Rows that totals of 64 bits hold, whatever the rows are."""
        return int(_LARGEST_TOTAL / self.limit**2)

    def integers(self, features: Tensor) -> tuple[Tensor, int]:
        """Rows (N, D) on the grid, in double precision; and how many of them were shortened.

        >>> MomentConfig(bound=4, step=0.5).integers(torch.tensor([[1.9, -0.7], [30.0, 40.0]]))
        (tensor([[ 3., -1.],
                [ 4.,  6.]], dtype=torch.float64), 1)
        """
        features = features.double()
        norms = features.norm(dim=1, keepdim=True)  # (N, 1)
        shorten = norms > self.bound
        scaled = torch.where(shorten, features * (self.bound / norms.clamp(min=1e-300)), features)
        return (scaled / self.step).trunc(), int(shorten.sum())

    def target_integers(self, targets: Tensor) -> tuple[Tensor, int]:
        """The columns of targets that rows have beside their features, and how many rows were cut off. (N, outputs)

        >>> MomentConfig(targets="values", outputs=1, value_bound=2**16).target_integers(torch.tensor([[3.2], [1e9]]))
        (tensor([[3.0000e+00],
                [6.5536e+04]], dtype=torch.float64), 1)
        """
        if kind_of(targets) == self.targets == "classes":
            return torch.zeros(len(targets), 0, dtype=torch.float64, device=targets.device), 0
        if kind_of(targets) != self.targets or targets.shape[1:] != (self.outputs,):
            raise DataError(
                f"Rows have {kind_of(targets)} {tuple(targets.shape[1:])}, not {self.outputs} {self.targets}."
            )
        if self.targets == "labels":
            return targets.double(), 0
        beyond = (targets.abs() > self.value_bound).any(1)
        steps = (targets.double() / self.value_step).round()
        return steps.clamp(-VALUE_STEPS, VALUE_STEPS), int(beyond.sum())


@dataclass(frozen=True, eq=False)
class IntegerMoments:
    """Of some rows: how many each class has, the sum of their features by class, and the sum of x xᵀ over all of them.

    >>> config, rows, labels = MomentConfig(), torch.randn(50, 4), torch.arange(50) % 3
    >>> whole, part = (IntegerMoments.of(rows[:n], labels[:n], 3, config) for n in (50, 20))
    >>> (whole - part + part) == whole
    True
    """

    counts: Tensor  # (K,)
    sums: Tensor  # (K, D)
    second: Tensor  # (D (D + 1) / 2,) the lower triangle, row by row

    @classmethod
    def zeros(cls, num_classes: int, width: int) -> Self:
        """Of no row."""
        sizes = (num_classes,), (num_classes, width), (width * (width + 1) // 2,)
        return cls(*(torch.zeros(size, dtype=torch.int64) for size in sizes))

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, num_classes: int, config: MomentConfig) -> Self:
        """Of rows (N, D) and their classes (N,)."""
        rows, _ = config.integers(features)
        return cls(*class_sums(rows, labels, num_classes), second_moment(rows, config))

    @property
    def width(self) -> int:
        """Number of features."""
        return self.sums.shape[1]

    @property
    def rows(self) -> int:
        """Of all classes."""
        return int(self.counts.numpy().sum())  # numpy is quicker to call, and this is asked often

    @property
    def held(self) -> list[int]:
        """Classes with rows."""
        held: list[int] = self.counts.numpy().nonzero()[0].tolist()
        return held

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.counts.nbytes + self.sums.nbytes + self.second.nbytes

    def __add__(self, other: "IntegerMoments") -> "IntegerMoments":
        self._check_alike(other)
        return IntegerMoments(self.counts + other.counts, self.sums + other.sums, self.second + other.second)

    def add_(self, other: "IntegerMoments") -> None:
        """Add others to these, in place."""
        self._check_alike(other)
        for own, others in ((self.counts, other.counts), (self.sums, other.sums), (self.second, other.second)):
            own.add_(others)

    def __sub__(self, other: "IntegerMoments") -> "IntegerMoments":
        self._check_alike(other)
        return IntegerMoments(self.counts - other.counts, self.sums - other.sums, self.second - other.second)

    def _check_alike(self, other: "IntegerMoments") -> None:
        if self.sums.shape != other.sums.shape:  # or PyTorch would repeat a single class
            raise DataError(
                f"Moments of {len(self.sums)} classes and {self.width} features, and of {len(other.sums)} and "
                f"{other.width}, do not add up: they come from other models or sets of classes."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntegerMoments) and all(
            torch.equal(own, others)
            for own, others in ((self.counts, other.counts), (self.sums, other.sums), (self.second, other.second))
        )

    __hash__ = None  # type: ignore[assignment]

    def check(self, config: MomentConfig, *, products: bool = True) -> None:
        """Raise where these are not the moments of any rows within the bound.

        Without `products`, second moments are looked at for their size only: that is enough for a sum of moments each
        of which was checked, and a factorisation is most of the work of a request.
        """
        counts, sums = self.counts.numpy(), self.sums.numpy().astype(np.float64)  # small: numpy is quicker to call
        rows = int(counts.sum())
        if (counts < 0).any():
            raise DataError("a class has fewer than 0 rows")
        if rows > config.most_rows:
            raise DataError(f"{rows:,} rows are more than 64 bits hold the totals of: {config.most_rows:,}")
        if (np.sqrt(np.einsum("ij,ij->i", sums, sums)) > counts * (config.limit * (1 + 1e-9))).any():
            raise DataError("the sum of a class is longer than its rows can be")
        trace = trace_of(self.second, self.width)
        if trace > rows * config.limit**2 * (1 + 1e-9):
            raise DataError("second moments are larger than rows within the bound have")
        if not products:
            return
        held = counts > 0
        means = torch.from_numpy(sums[held] / np.sqrt(counts[held])[:, None])
        border = 0 if self.width % _SLOW else _BORDER
        bordered = torch.eye(self.width + border, dtype=torch.float64)  # positive where what it borders is
        # within classes: positive semidefinite for real rows
        scatter = _put_lower(self.second, bordered[: self.width, : self.width]).addmm_(means.T, means, alpha=-1)
        scatter.diagonal().add_(1e-9 * trace + 1e-3)
        if int(torch.linalg.cholesky_ex(bordered).info):
            raise DataError("second moments are not those of any rows with these sums")

    def lower_second(self) -> Tensor:
        """The lower triangle of the second moments, zeros above it. (D, D) in double precision"""
        return _put_lower(self.second, torch.zeros(self.width, self.width, dtype=torch.float64))

    def dense_second(self) -> Tensor:
        """The second moments as a full matrix. (D, D) in double precision"""
        return unpacked(self.second, self.width)


def one_class(moments: IntegerMoments, label: int, second: Tensor) -> IntegerMoments:
    """One class of some moments, whose own second moments these are."""
    alone = IntegerMoments.zeros(*moments.sums.shape)
    alone.counts[label], alone.sums[label] = moments.counts[label], moments.sums[label]
    return replace(alone, second=second)


def class_sums(rows: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Counts (K,) and sums (K, D) by class of rows that hold integers."""
    counts = torch.bincount(labels, minlength=num_classes)
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_add_(0, labels, rows)  # exact: integers below 2^52
    return counts.cpu(), sums.long().cpu()


def second_moment(rows: Tensor, config: MomentConfig) -> Tensor:
    """The sum of x xᵀ over rows that hold integers, exactly; its lower triangle."""
    width, block = rows.shape[1], int(_EXACT / config.limit**2)
    total = torch.zeros(width * (width + 1) // 2, dtype=torch.int64)
    for part in rows.split(block):
        total += packed((part.T @ part).long().cpu())
    return total


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix, row by row."""
    return matrix.masked_select(_lower(len(matrix)).to(matrix.device))


def unpacked(triangle: Tensor, width: int) -> Tensor:
    """The symmetric matrix of a lower triangle, in double precision. (D, D)"""
    if width <= _NARROW:
        return triangle.double()[_places(width)]
    matrix = torch.zeros(width, width, dtype=torch.float64).masked_scatter_(_lower(width), triangle.double())
    return matrix + matrix.tril(-1).T


def _put_lower(triangle: Tensor, matrix: Tensor) -> Tensor:
    """Write a lower triangle into a matrix; returns the matrix."""
    matrix.numpy()[_lower(len(matrix)).numpy()] = triangle.numpy()  # a third of the time that masked_scatter_ takes
    return matrix


def diagonal_of(triangle: Tensor, width: int) -> np.ndarray:
    """The diagonal of a symmetric matrix, from its lower triangle. (D,)"""
    diagonal: np.ndarray = triangle.numpy()[_diagonal(width)]
    return diagonal


def trace_of(triangle: Tensor, width: int) -> float:
    """The sum of the diagonal of a symmetric matrix, from its lower triangle."""
    return float(diagonal_of(triangle, width).sum(dtype=np.float64))


@lru_cache(maxsize=8)
def _diagonal(width: int) -> np.ndarray:
    return np.arange(1, width + 1).cumsum() - 1


@lru_cache(maxsize=2)
def _places(width: int) -> Tensor:
    """Where each entry of a symmetric matrix lies in its lower triangle. (D, D)"""
    rows, columns = torch.arange(width)[:, None], torch.arange(width)[None]
    low, high = torch.minimum(rows, columns), torch.maximum(rows, columns)
    return high * (high + 1) // 2 + low


@lru_cache(maxsize=2)
def _lower(width: int) -> Tensor:
    """A mask of the lower triangle."""
    return torch.ones(width, width, dtype=torch.bool).tril_()


def retained_mask(groups: Tensor, left_out: Tensor, config: MomentConfig) -> Tensor:
    """Which of a client's rows its moments are of, where some (a mask) are to be left out.

    A class goes as a whole where fewer than `least_rows` would stay, and where fewer than that would leave alone: their
    sums would show them. So what is retained depends on what is left out, not on the order in which that was asked.
    Labels (N, K) are groups that share rows: one that goes may take another with it.
    """
    members = list(groups.T) if groups.ndim == 2 else [groups == label for label in groups.unique().tolist()]
    reported = _without_few(members, torch.ones_like(left_out), None, config.least_rows)
    return _without_few(members, reported & ~left_out, reported, config.least_rows)


def _without_few(members: list[Tensor], kept: Tensor, reported: Tensor | None, least: int) -> Tensor:
    """The rows to keep, without groups of which few would stay, or few of those `reported` would leave."""
    before = torch.zeros_like(kept)
    while not torch.equal(before, kept):
        before = kept.clone()
        for own in members:
            leaving = 0 if reported is None else int((own & reported & ~kept).sum())
            if int((own & kept).sum()) < least or 0 < leaving < least:
                kept = kept & ~own
    return kept


def row_groups(y: Tensor, config: MomentConfig) -> Tensor:
    """The groups of rows that `retained_mask` looks at: classes (N,), or all rows and those with each label (N, K)."""
    if config.targets == "classes":
        return y
    everything = torch.ones(len(y), 1, dtype=torch.bool, device=y.device)
    return torch.cat([everything, y], 1) if config.targets == "labels" else everything


def rows_staying(rows: int, leaving: int, config: MomentConfig) -> int:
    """How many of a class's rows a client's moments are of, where some are to be left out (see `retained_mask`)."""
    staying = rows - leaving
    return 0 if staying < config.least_rows or 0 < leaving < config.least_rows else staying
