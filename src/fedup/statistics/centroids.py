"""A client's centroids, as pure functions: the same code in process and on a real node."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedup.errors import SettingError
from fedup.federation import check_samples
from fedup.models.features import FeatureReader
from fedup.privacy.paper import DISCLAIMER, add_noise, paper_epsilon
from fedup.rng import generator, seed_for
from fedup.statistics.client_data import ClientData
from fedup.statistics.kmeans import centroid_count, cluster_cells

_GROUP_ROWS = 4096


@dataclass(frozen=True)
class Summary:
    """One client's message: the centroids of some of its (client, class) cells.

    Under `DP` it has one vector for every class, held or not: noisy statistics (`fedup.privacy.dp`).
    """

    client: int
    labels: tuple[int, ...]  # one per cell
    sizes: tuple[int, ...]  # centroids per cell; 0 if no row of it is retained
    excluded: tuple[frozenset[int], ...]  # sample ids left out of each cell
    vectors: Tensor  # (sum of sizes, D)
    counts: Tensor  # (sum of sizes,) points behind each centroid
    nonnegative: bool
    shape: tuple[int, ...]  # of one row's features at the cut, D in all
    paper_epsilons: tuple[float, ...] = ()  # one per cell, if counted: noise only, not a DP guarantee
    rows: Mapping[int, int] = field(default_factory=dict)  # by class, excluded ones too; empty under DP


@dataclass(frozen=True)
class CentroidConfig:
    """How features become centroids: ratio ρ, noise σ, the seed, and whether the paper's ε is counted."""

    ratio: float = field(default=0.8, metadata={"help": "Centroids per row of a cell, ρ in (0, 1]."})
    sigma: float = field(
        default=0.0,
        metadata={"help": "The paper's Gaussian noise on each centroid, σ: noise only, not a DP guarantee."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the clustering and of --sigma's noise."})
    paper_accounting: bool = field(
        default=False, metadata={"help": "Count the paper's ε of that noise: not a DP guarantee either."}
    )

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise SettingError(f"ratio must be in (0, 1]; found {self.ratio}. The paper uses 0.8, 0.1 and 0.5.")
        if not 0 <= self.sigma < float("inf"):
            raise SettingError(f"sigma must be 0 or a positive number; found {self.sigma}. The paper uses 0.001.")
        if self.paper_accounting and not self.sigma:
            raise SettingError("The paper's ε is that of its noise: without noise (sigma 0) there is none to count.")

    @property
    def mechanism(self) -> str:
        """What protects a message, in words."""
        return f"gaussian noise, σ = {self.sigma:g} ({DISCLAIMER})" if self.sigma else "none"


@dataclass(frozen=True)
class _Cell:
    """A client's rows of one class, without excluded samples."""

    label: int
    retained: Tensor  # (n,) a mask over the client's rows
    excluded: frozenset[int]  # sample ids
    rows: int  # retained
    size: int  # centroids
    stream: tuple[object, ...]  # the name of its random stream


def summarize(
    data: ClientData,
    cut: str,
    config: CentroidConfig,
    *,
    labels: frozenset[int] | None = None,
    excluded: frozenset[int] = frozenset(),
) -> Summary:
    """The centroids of a client's cells without the excluded samples (all its cells, or those of `labels`).

    Excluded rows are never read. A cell's centroids depend on (seed, client, class, excluded ids of that cell) only.
    """
    rows = data.client.train
    rows = rows[data.y[rows].argsort(stable=True)]  # cell after cell
    cells = _cells(data, rows, config, labels, excluded)
    sizes = [cell.size for cell in cells]
    vectors, counts = torch.empty(0), torch.empty(sum(sizes), dtype=torch.int32, device=rows.device)
    epsilons: list[float] = []
    done = 0
    with torch.autocast(data.x.device.type, enabled=False):  # the same bits in any mode of the caller
        reader = data.shared_reader(cut) or FeatureReader(data.model, cut)
        for group in _groups(cells):
            wanted = sum((cell.retained for cell in group), start=torch.zeros_like(rows, dtype=torch.bool))
            features = reader.read(data.x, rows, wanted=wanted)
            if not done:
                vectors = features.values.new_empty(sum(sizes), features.values.shape[1])
            slot = slice(done, done + sum(cell.size for cell in group))
            members = [cell.retained[wanted].nonzero().flatten() for cell in group]
            seeds = [seed_for(config.seed, "kmeans", *cell.stream) for cell in group]
            written = {"out": vectors[slot], "counts": counts[slot]}
            cluster_cells(features.values, members, ratio=config.ratio, seeds=seeds, **written)
            done = slot.stop
            if config.paper_accounting:
                epsilons += [paper_epsilon(features.values[own], config.sigma) for own in members]
        for cell, own in zip(cells, vectors.split(sizes), strict=True):
            add_noise(own, config.sigma, generator(config.seed, "noise", *cell.stream))
    return Summary(
        data.client.id,
        labels=tuple(cell.label for cell in cells),
        sizes=tuple(sizes),
        excluded=tuple(cell.excluded for cell in cells),
        vectors=vectors,
        counts=counts,
        nonnegative=features.nonnegative,
        shape=features.shape,
        paper_epsilons=tuple(epsilons),
    )


def _cells(
    data: ClientData, rows: Tensor, config: CentroidConfig, labels: frozenset[int] | None, excluded: frozenset[int]
) -> list[_Cell]:
    classes, samples = data.y[rows], rows if data.ids is None else data.ids[rows]
    check_samples(samples, excluded, data.client.id)
    left_out = torch.isin(samples, torch.tensor(sorted(excluded), dtype=samples.dtype, device=rows.device))
    held = [label for label in classes.unique().tolist() if labels is None or label in labels]
    retained = [~left_out & (classes == label) for label in held]
    counts = torch.stack([mask.sum() for mask in retained]).tolist() if held else []  # one transfer from the device
    cells = []
    for label, mask, count in zip(held, retained, counts, strict=True):
        ids = frozenset(samples[left_out & (classes == label)].tolist())
        stream = ("cell", data.client.id, label, *sorted(ids))
        cells.append(_Cell(label, mask, ids, count, centroid_count(count, config.ratio), stream))
    return cells


def _groups(cells: list[_Cell]) -> Iterator[list[_Cell]]:
    """Cells to read and cluster together, so that memory stays bounded: many small ones, or one large one. At least one
    group, perhaps empty."""
    group: list[_Cell] = []
    for cell in cells:
        if group and sum(each.rows for each in group) + cell.rows > _GROUP_ROWS:
            yield group
            group = []
        group.append(cell)
    yield group
