"""The bottleneck of a set of requests, fitted to what they leave of the centroids."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.filters.eraser import PlacedEraser
from fedup.filters.fit import Examples, Trace, fit_filter
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.privacy.guarantee import DP
from fedup.privacy.projection import basis_of
from fedup.privacy.resample import resample
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Cell, Centroids


def names_cell(request: Forget, cell: Cell) -> bool:
    """Whether a client or class request leaves this cell out."""
    return cell.client in request.client_ids or cell.label in request.class_ids


def fit_bottleneck(
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    gone: Forget,
    config: FilterConfig,
    *,
    trace: Trace | None = None,
    erasure: PlacedEraser | None = None,
    notes: list[str] | None = None,
    emphasis: Mapping[int, float] | None = None,
) -> tuple[Bottleneck, int]:
    """The filter and how many centroids it was fitted to; classes in `emphasis` are drawn so many times as often.

    Behind an eraser at the same cut it is fitted to what that leaves of the centroids; with one at an earlier cut, to
    the centroids as they are: retained rows pass it nearly unchanged.
    """
    tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
    if centroids.dp:
        examples = _resampled(centroids.dp, plugged, centroids, used, gone, config, tail, notes)
    else:
        examples = _examples(centroids, used, gone, config)
    if erasure is not None and erasure.cut == plugged.cut:
        rows = torch.arange(len(examples.rows), device=examples.rows.device)
        kept = examples.vectors[examples.rows].reshape(-1, *centroids.shape)
        examples = replace(examples, vectors=erasure.filter.to(kept.device)(kept).flatten(1), rows=rows)
    if emphasis:
        shares = torch.ones(len(examples.rows), device=examples.rows.device)
        for label, times in emphasis.items():
            shares[examples.labels == label] = times
        examples = replace(examples, shares=shares)
    return fit_filter(tail, examples, config, trace=trace), len(centroids.rows_of(used))


def used_cells(centroids: Centroids, gone: Forget, config: FilterConfig) -> list[Cell]:
    """The cells that a filter for these requests is fitted to."""
    remapped = config.class_policy != "drop"
    return [
        cell
        for cell in centroids.cells
        if cell.client not in gone.client_ids and (remapped or cell.label not in gone.class_ids)
    ]


def _examples(centroids: Centroids, used: list[Cell], gone: Forget, config: FilterConfig) -> Examples:
    rows = centroids.rows_of(used)
    labels = centroids.row_labels()
    retained = torch.tensor([label for label in range(centroids.num_classes) if label not in gone.class_ids])
    for cell in used:
        if cell.label in gone.class_ids:
            labels[cell.slot] = _remapped(cell, retained, config).to(labels)
    return Examples(
        vectors=centroids.vectors,
        rows=rows,
        labels=labels[rows],
        nonnegative=centroids.nonnegative,
        guarded=sorted(gone.class_ids) if config.class_policy == "drop" else (),
    )


def _resampled(
    dp: DP,
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    gone: Forget,
    config: FilterConfig,
    tail: Callable[[Tensor], Tensor],
    notes: list[str] | None,
) -> Examples:
    """Under DP: features drawn from what clients released, as many whatever the number of clients."""
    width, rows = math.prod(centroids.shape), centroids.rows_of(used)
    basis = basis_of(
        plugged.base, plugged.cut, width, how=dp.projection, dims=dp.dims, num_classes=centroids.num_classes
    ).to(centroids.vectors)
    drawn = resample(
        dp,
        centroids.vectors[rows],
        centroids.row_labels()[rows],
        basis=basis,
        num_classes=centroids.num_classes,
        tail=tail,
        seed=config.seed,
    )
    labels = drawn.labels
    if drawn.dropped and notes is not None:
        named = ", ".join(map(str, drawn.dropped))
        notes.append(f"Class {named} does not stand out of the noise: the filter will not let it pass.")
    retained = torch.tensor([label for label in range(centroids.num_classes) if label not in gone.class_ids])
    for label in sorted(gone.class_ids & set(labels.unique().tolist())):
        relabelled = torch.randint(len(retained), labels.shape, generator=generator(config.seed, "remap", label))
        labels = torch.where(labels == label, retained[relabelled].to(labels), labels)
    return Examples(
        vectors=drawn.vectors,
        rows=torch.arange(len(labels), device=labels.device),
        labels=labels,
        nonnegative=False,
        guarded=sorted(gone.class_ids) if config.class_policy == "drop" else (),
        basis=None if basis.shape[0] == basis.shape[1] else basis,
    )


def _remapped(cell: Cell, retained: Tensor, config: FilterConfig) -> Tensor:
    """Random retained classes in place of a forgotten one: one per centroid, or one for all of the client's."""
    many = cell.size if config.class_policy == "remap" else 1
    source = generator(config.seed, "remap", cell.client, cell.label)
    return retained[torch.randint(len(retained), (many,), generator=source)].expand(cell.size)
