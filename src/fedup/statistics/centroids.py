"""What a client answers after training, as pure functions: the same code in process and on a real node."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.federation import check_samples
from fedup.models.cut import FeatureReader
from fedup.privacy.paper import DISCLAIMER, add_noise, paper_epsilon
from fedup.rng import generator, seed_for
from fedup.statistics.kmeans import centroid_count, cluster_cells

_GROUP_ROWS = 4096


@dataclass(frozen=True)
class Summary:
    """One client's message: the centroids of some of its (client, class) cells.

    Under `DP` it has one vector for every class, held or not: noisy statistics (`fedup.privacy.dp`).
    """

    client: int
    labels: tuple[int, ...]  # one per cell
    sizes: tuple[int, ...]  # centroids per cell; 0 when nothing of the cell is retained
    excluded: tuple[frozenset[int], ...]  # sample ids left out of each cell
    vectors: Tensor  # (sum of sizes, D)
    counts: Tensor  # (sum of sizes,) points behind each centroid
    nonnegative: bool
    shape: tuple[int, ...]  # of one row's features at the cut, D in all
    paper_epsilons: tuple[float, ...] = ()  # one per cell, where they are counted: noise only, not a DP guarantee
    rows: Mapping[int, int] = field(default_factory=dict)  # by class, with those left out; nothing of it under DP


@dataclass(frozen=True)
class CentroidConfig:
    """How features become centroids: ratio ρ, noise σ, the run's seed; whether the paper's ε is counted."""

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


def summarize(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    *,
    client: int,
    cut: str,
    how: CentroidConfig,
    labels: frozenset[int] | None = None,
    excluded: frozenset[int] = frozenset(),
    ids: Tensor | None = None,
    out: Tensor | None = None,
    reader: FeatureReader | None = None,
) -> Summary:
    """The centroids of a client's cells without the excluded samples (all its cells, or those of `labels`).

    A row's sample id is its number, or what `ids` has at that number.

    The vectors are written to `out` where it is given; a `reader` of this model and cut may be shared by clients of
    one process. Excluded rows are never read. A cell's centroids depend on
    (seed, client, class, excluded ids of that cell) only.
    """
    rows = rows[y[rows].argsort(stable=True)]  # cells lie one after another
    classes, samples = y[rows], rows if ids is None else ids[rows]
    check_samples(samples, excluded, client)
    left_out = torch.isin(samples, torch.tensor(sorted(excluded), dtype=samples.dtype, device=rows.device))
    held = [label for label in classes.unique().tolist() if labels is None or label in labels]
    with torch.autocast(x.device.type, enabled=False):  # a cell has the same bits whatever the caller is doing
        reader = reader or FeatureReader(model, cut)
        return _summarize_cells(reader, x, rows, classes, samples, left_out, held, client=client, how=how, out=out)


def _summarize_cells(
    reader: FeatureReader,
    x: Tensor,
    rows: Tensor,
    classes: Tensor,
    samples: Tensor,
    left_out: Tensor,
    held: list[int],
    *,
    client: int,
    how: CentroidConfig,
    out: Tensor | None,
) -> Summary:
    retained = [(~left_out & (classes == label)) for label in held]  # a mask over rows for each cell
    out_of_cell = [frozenset(samples[left_out & (classes == label)].tolist()) for label in held]
    names = [("cell", client, label, *sorted(ids)) for label, ids in zip(held, out_of_cell, strict=True)]
    rows_of = torch.stack([mask.sum() for mask in retained]).tolist() if retained else []
    sizes = [centroid_count(count, how.ratio) for count in rows_of]
    vectors, done = out, 0
    counts = torch.empty(sum(sizes), dtype=torch.int32, device=rows.device)
    epsilons: list[float] = []
    for group in _groups(rows_of):
        wanted = sum((retained[i] for i in group), start=torch.zeros_like(left_out))
        features = reader.read(x, rows, wanted=wanted)
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
        if how.paper_accounting:
            epsilons += [paper_epsilon(features.values[retained[i][wanted]], how.sigma) for i in group]
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
        paper_epsilons=tuple(epsilons),
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
