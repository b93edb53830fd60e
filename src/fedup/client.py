"""What a client computes, as pure functions: the same code in process and on a real node."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedup.cut import logits_of, read_features
from fedup.errors import SettingError
from fedup.federation import check_samples
from fedup.kmeans import centroid_count, cluster_cells
from fedup.privacy import add_noise
from fedup.rng import generator, seed_for

_GROUP_ROWS = 4096


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round; the optimizer starts anew each time."""

    epochs: int = 1
    batch_size: int = 64
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise SettingError(f"epochs and batch_size must be at least 1; found {self.epochs} and {self.batch_size}.")
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            raise SettingError(f"lr must be above 0, momentum in [0, 1), weight_decay at least 0; found {self}.")
        if self.optimizer not in ("sgd", "adam"):
            raise SettingError(f"optimizer must be 'sgd' or 'adam'; found {self.optimizer!r}.")

    def start(self, model: nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer for the model's parameters."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer == "adam":
            return torch.optim.Adam(trainable, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(trainable, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


def train_locally(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, *, how: LocalTraining, seed: int) -> None:
    """Train `model` in place on the rows: same seed, same bits, whatever ran before."""
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # dropout draws from the global stream
        torch.manual_seed(seed_for(seed, "dropout"))
        order = generator(seed, "batches")
        optimizer = how.start(model)
        model.train()
        for _ in range(how.epochs):
            for batch in full_batches(len(rows), how.batch_size, order):
                chosen = rows[batch.to(rows.device)]
                loss = cross_entropy(logits_of(model(x[chosen])), y[chosen].long())
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()


def full_batches(n: int, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """A shuffled epoch in batches of one size: the last is filled from the start of the permutation.

    BatchNorm and captured graphs need full batches. Fewer than `size` rows make one batch; a single row counts twice.
    """
    if n == 0:
        return
    size = max(2, min(n, size))
    permutation = torch.randperm(n, generator=order)
    yield from torch.cat([permutation, permutation[: -n % size]]).split(size)


@dataclass(frozen=True)
class Summary:
    """One client's message: the centroids of some of its (client, class) cells."""

    client: int
    labels: tuple[int, ...]  # one per cell
    sizes: tuple[int, ...]  # centroids per cell; 0 when nothing of the cell is retained
    excluded: tuple[frozenset[int], ...]  # sample ids left out of each cell
    vectors: Tensor  # (sum of sizes, D)
    counts: Tensor  # (sum of sizes,) points behind each centroid
    nonnegative: bool
    shape: tuple[int, ...]  # of one row's features at the cut, D in all


@dataclass(frozen=True)
class Summarizing:
    """How features become centroids: ratio ρ, noise σ, the run's seed."""

    ratio: float = 0.8
    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise SettingError(f"ratio must be in (0, 1]; found {self.ratio}. The paper uses 0.8, 0.1 and 0.5.")
        if not 0 <= self.sigma < float("inf"):
            raise SettingError(f"sigma must be 0 or a positive number; found {self.sigma}. The paper uses 0.001.")


def summarize(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    *,
    client: int,
    cut: str,
    how: Summarizing,
    labels: frozenset[int] | None = None,
    excluded: frozenset[int] = frozenset(),
    out: Tensor | None = None,
) -> Summary:
    """The centroids of a client's cells without the excluded samples (all its cells, or those of `labels`).

    The vectors are written to `out` where it is given. Excluded rows are never read. A cell's centroids depend on
    (seed, client, class, excluded ids of that cell) only.
    """
    check_samples(rows, excluded, client)
    rows = rows[y[rows].argsort(stable=True)]  # cells lie one after another
    classes = y[rows]
    left_out = torch.isin(rows, torch.tensor(sorted(excluded), dtype=rows.dtype, device=rows.device))
    held = [label for label in classes.unique().tolist() if labels is None or label in labels]
    with torch.autocast(x.device.type, enabled=False):  # a cell has the same bits whatever the caller is doing
        return _summarize_cells(model, x, rows, classes, left_out, held, client=client, cut=cut, how=how, out=out)


def _summarize_cells(
    model: nn.Module,
    x: Tensor,
    rows: Tensor,
    classes: Tensor,
    left_out: Tensor,
    held: list[int],
    *,
    client: int,
    cut: str,
    how: Summarizing,
    out: Tensor | None,
) -> Summary:
    retained = [(~left_out & (classes == label)) for label in held]  # a mask over rows for each cell
    out_of_cell = [frozenset(rows[left_out & (classes == label)].tolist()) for label in held]
    names = [("cell", client, label, *sorted(ids)) for label, ids in zip(held, out_of_cell, strict=True)]
    sizes = [centroid_count(int(mask.sum()), how.ratio) for mask in retained]
    vectors, done = out, 0
    counts = torch.empty(sum(sizes), dtype=torch.int32, device=rows.device)
    for group in _groups([int(mask.sum()) for mask in retained]):
        wanted = sum((retained[i] for i in group), start=torch.zeros_like(left_out))
        features = read_features(model, cut, x, rows, wanted=wanted)
        if vectors is None:
            vectors = features.values.new_empty(sum(sizes), features.values.shape[1])
        size = sum(sizes[i] for i in group)
        cluster_cells(
            features.values,
            [retained[i][wanted].nonzero().flatten() for i in group],
            ratio=how.ratio,
            seeds=[seed_for(how.seed, "kmeans", *names[i]) for i in group],
            out=vectors[done : done + size],
            counts=counts[done : done + size],
        )
        done += size
    assert vectors is not None  # there is at least one group, if an empty one
    for cell, name in zip(vectors.split(sizes), names, strict=True):
        add_noise(cell, how.sigma, generator(how.seed, "noise", *name))
    return Summary(
        client,
        labels=tuple(held),
        sizes=tuple(sizes),
        excluded=tuple(out_of_cell),
        vectors=vectors,
        counts=counts,
        nonnegative=features.nonnegative,
        shape=features.shape,
    )


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Cells to read and cluster together: many small ones, or a large one alone, so that memory stays bounded."""
    group: list[int] = []
    for i, size in enumerate(sizes):
        if group and sum(sizes[j] for j in group) + size > _GROUP_ROWS:
            yield group
            group = []
        group.append(i)
    yield group
