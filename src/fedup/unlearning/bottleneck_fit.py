"""The bottleneck for a set of requests, fitted to the retained centroids."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.filters.eraser import PlacedEraser
from fedup.filters.fit import Examples, Trace, fit_filter
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.privacy.projection import basis_of
from fedup.privacy.resample import resample
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Cell, CellName, Centroids


def names_cell(request: Forget, cell: Cell) -> bool:
    """Whether a request names the client or the class of this cell."""
    return cell.client in request.client_ids or cell.label in request.class_ids


@dataclass(frozen=True)
class FittedBottleneck:
    """A filter, and notes on its fit."""

    filter: Bottleneck
    centroids_used: int
    notes: Sequence[str]  # for people


def fit_bottleneck(
    plugged: PluggedModel,
    centroids: Centroids,
    forget_set: Forget,
    config: FilterConfig,
    *,
    erasure: PlacedEraser | None = None,
    emphasis: Mapping[int, float] | None = None,
    trace: Trace | None = None,
) -> FittedBottleneck:
    """A filter fitted to the retained centroids; `emphasis` says how many times as often a class is drawn.

    With an eraser at the same cut it is fitted to the erased centroids. An eraser at an earlier cut leaves retained
    rows nearly unchanged, so the centroids are used as they are.
    """
    tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
    used = [*cells_in_use(centroids, forget_set, config)]
    if centroids.dp:
        examples, dropped = _resampled(plugged, centroids, used, forget_set, config, tail)
    else:
        examples, dropped = _examples(centroids, used, forget_set, config), ()
    if erasure is not None and erasure.cut == plugged.cut:
        rows = torch.arange(len(examples.rows), device=examples.rows.device)
        features = examples.vectors[examples.rows].reshape(-1, *centroids.shape)
        examples = replace(examples, vectors=erasure.filter.to(features.device)(features).flatten(1), rows=rows)
    if emphasis:
        shares = torch.ones(len(examples.rows), device=examples.rows.device)
        for label, times in emphasis.items():
            shares[examples.labels == label] = times
        examples = replace(examples, shares=shares)
    notes = [f"Class {', '.join(map(str, dropped))} does not stand out of the noise: the filter will not let it pass."]
    fitted = fit_filter(tail, examples, config, trace=trace)
    return FittedBottleneck(fitted, len(centroids.rows_of(used)), notes if dropped else ())


@dataclass(frozen=True, eq=False)
class CellsInUse:
    """The cells of a store that a filter is fitted to: found out for those that are looked at.

    Cells that wait for their client are not among them, unless they count as if it had answered (`answered`).
    """

    store: Centroids
    dropped: Forget  # clients and classes
    answered: bool = False

    def __contains__(self, cell: Cell) -> bool:
        return not names_cell(self.dropped, cell) and (self.answered or not self.store.awaits(cell))

    def __iter__(self) -> Iterator[Cell]:
        return (cell for cell in self.store.cells if cell in self)

    def __bool__(self) -> bool:
        return bool(self.store.classes_held(without=self.dropped.client_ids) - self.dropped.class_ids)

    def names(self, cells: Collection[CellName]) -> list[CellName]:
        """Those of these cells that are in use."""
        clients, classes = self.dropped.client_ids, self.dropped.class_ids
        return [name for name in cells if name[1] not in classes and name[0] not in clients]

    def of(self, client: int) -> list[Cell]:
        """Those of one client."""
        return [cell for cell in self.store.cells_of(client) if cell in self]

    @property
    def filled_rows(self) -> int:
        """Rows of the store that are not empty."""
        waiting = [cell for cell in self.store.cells_pending if not names_cell(self.dropped, cell)]
        return self.store.rows_besides(self.dropped) - sum(self.store.filled_in(cell) for cell in waiting)


def cells_in_use(centroids: Centroids, forget_set: Forget, config: FilterConfig) -> CellsInUse:
    """The cells that a filter for these requests is fitted to."""
    classes = forget_set.class_ids if config.class_policy == "drop" else frozenset()
    return CellsInUse(centroids, Forget(forget_set.client_ids, classes))


def _examples(centroids: Centroids, used: list[Cell], forget_set: Forget, config: FilterConfig) -> Examples:
    rows, labels, retained = centroids.rows_of(used), centroids.row_labels(), _retained(centroids, forget_set)
    for cell in used:
        if cell.label in forget_set.class_ids:
            labels[cell.slot] = _remapped(cell, retained, config).to(labels)
    guarded = sorted(forget_set.class_ids) if config.class_policy == "drop" else ()
    return Examples(centroids.vectors, rows, labels[rows], centroids.nonnegative, guarded)


def _resampled(
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    forget_set: Forget,
    config: FilterConfig,
    tail: Callable[[Tensor], Tensor],
) -> tuple[Examples, Sequence[int]]:
    """Under DP: features drawn from the clients' releases, and the classes that do not stand out of the noise."""
    dp, classes, rows = centroids.dp, centroids.num_classes, centroids.rows_of(used)
    assert dp is not None
    width, projection = math.prod(centroids.shape), dp.projection
    basis = basis_of(plugged.base, plugged.cut, width, how=projection, dims=dp.dims, num_classes=classes)
    basis = basis.to(centroids.vectors)
    released, owners = centroids.vectors[rows], centroids.row_labels()[rows]
    drawn = resample(dp, released, owners, basis=basis, num_classes=classes, tail=tail, seed=config.seed)
    labels, retained = drawn.labels, _retained(centroids, forget_set)
    for label in sorted(forget_set.class_ids & set(labels.unique().tolist())):
        relabelled = torch.randint(len(retained), labels.shape, generator=generator(config.seed, "remap", label))
        labels = torch.where(labels == label, retained[relabelled].to(labels), labels)
    guarded = sorted(forget_set.class_ids) if config.class_policy == "drop" else ()
    within = None if basis.shape[0] == basis.shape[1] else basis
    everything = torch.arange(len(labels), device=labels.device)
    return Examples(drawn.vectors, everything, labels, False, guarded, basis=within), drawn.dropped


def _retained(centroids: Centroids, forget_set: Forget) -> Tensor:
    """The retained classes."""
    return torch.tensor([label for label in range(centroids.num_classes) if label not in forget_set.class_ids])


def _remapped(cell: Cell, retained: Tensor, config: FilterConfig) -> Tensor:
    """Random retained classes in place of a forgotten one: one per centroid, or one for the whole cell."""
    draws = cell.size if config.class_policy == "remap" else 1
    source = generator(config.seed, "remap", cell.client, cell.label)
    return retained[torch.randint(len(retained), (draws,), generator=source)].expand(cell.size)
