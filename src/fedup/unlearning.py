"""Requests answered at the server: unlearn, restore, purge."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedup.centroids import Cell, CellName, Centroids
from fedup.contact import Contact, InProcess
from fedup.cut import find_cut, flat_tail
from fedup.erasure import Erasing, Erasure
from fedup.errors import FingerprintError, PlugError, RequestError, SettingError
from fedup.federation import Federation
from fedup.filter import Bottleneck, FilterConfig
from fedup.fit import Examples, Trace, fit_filter
from fedup.plugging import ANSWERING, PluggedModel, Served
from fedup.positions import positions_of
from fedup.presets import PresetName
from fedup.presets import preset as settings_of
from fedup.privacy.guarantee import DP
from fedup.privacy.projection import basis_of
from fedup.privacy.resample import resample
from fedup.refresh import Refresh
from fedup.report import Report
from fedup.request import Forget, check_known, union
from fedup.rng import generator
from fedup.sharing import shared_view
from fedup.traffic import Traffic

_BROKEN = 0.5  # of the usual recall


def unlearn(
    plugged: PluggedModel,
    centroids: Centroids,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    preset: PresetName | None = None,
    keep_sealed: bool = False,
    trace: Trace | None = None,
) -> Report:
    """Fit a filter for the active requests and this one (or these), and serve through it.

    Client and class requests are answered from the centroids alone. A sample request asks the touched clients, reached
    through `clients`, to cluster the touched cells again without the samples; the old cells are replaced, and kept
    aside only with `keep_sealed`: restoring then asks nobody, unless other samples stay erased. The same clients are
    asked for what an eraser needs (`fedup.erasure`), unless `config` wants none. On an error nothing has changed.

    Settings are those of `config`, or of a `preset`, else those of the filter that is served, else the default ones.
    """
    new = _several(request)
    _check_arguments(plugged, centroids, new)
    if centroids is None:
        raise RequestError("Unlearning needs the centroids that collect() returned; found None.")
    with ANSWERING:
        _check_new(plugged, centroids, new)
        if config is not None and preset is not None:
            raise SettingError("Pass config= or preset=, not both: a preset is a config.")
        if preset is not None:
            config = settings_of(preset, new).config
        config = config or (plugged.served.config if plugged.served else FilterConfig())
        return _fit_for(plugged.requests | new, plugged, centroids, clients, config, keep_sealed, trace)


@dataclass(frozen=True)
class Plan:
    """What answering requests would take, found without changing anything."""

    cells_sealed: int  # left out by the requests, and used for nothing but restoration
    cells_asked: list[CellName]  # clustered again by their clients
    clients_contacted: list[int]
    centroids_kept: int  # rows that the filter is fitted to, before clients replace any
    clients_of_eraser: list[int]  # asked for statistics of forgotten rows
    notes: list[str]  # for people


def plan(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
) -> Plan:
    """What serving exactly this set of requests would take: nothing is fitted, replaced or sent.

    The classes of samples that were never asked about are looked up through `clients`.
    """
    requests = _several(requests)
    with ANSWERING:
        _check_belongs(plugged, centroids, requests)
        gone, config = union(requests), config or FilterConfig()
        check_known(gone, clients=centroids.clients, num_classes=centroids.num_classes)
        used = _used_cells(centroids, gone, config)
        refresh = Refresh(centroids, _contact(clients, plugged, centroids), Report(requests), keep_sealed=False)
        try:
            asked = [cell for _, cells, _ in refresh.touched(used, gone) for cell in cells]
        finally:
            refresh.undo()
        _check_shape(centroids, config)
        _check_budgets(requests, gone, plugged, centroids, used, refresh.contact, config)
        asks = Erasing(plugged.base, plugged.cut, config, refresh.contact, refresh.report, dp=centroids.dp)
        erasing = asks.clients_to_ask(requests, gone, plugged.served.question if plugged.served else None)
        return Plan(
            cells_sealed=sum(_names(gone, cell) for cell in centroids.cells),
            cells_asked=[cell.name for cell in asked],
            clients_contacted=sorted({*refresh.report.clients_contacted, *(cell.client for cell in asked), *erasing}),
            clients_of_eraser=erasing,
            notes=refresh.report.notes,
            centroids_kept=len(centroids.rows_of(used)),
        )


def rehearse(
    plugged: PluggedModel, centroids: Centroids, requests: Collection[Forget], config: FilterConfig
) -> Bottleneck:
    """A filter fitted for these requests to the centroids as they are: to measure with, never to serve."""
    gone = union(_several(requests))
    with torch.inference_mode(False), torch.autocast(centroids.vectors.device.type, enabled=False):
        return _fit(plugged, centroids, _used_cells(centroids, gone, config), gone, config)[0]


def restore(
    plugged: PluggedModel,
    centroids: Centroids | None,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    trace: Trace | None = None,
) -> Report:
    """Take a request (or several) back: a filter for the remaining ones; after the last none, and the original model.

    After the last one `plugged` has no filter: serve through `plugged.unplug()`, which is the base, bit for bit.
    """
    back = _several(request)
    _check_arguments(plugged, centroids, back)
    with ANSWERING:
        unknown = back - plugged.requests
        if unknown or not back or plugged.served is None:
            which = ", ".join(map(str, unknown)) or "nothing at all"
            raise RequestError(f"The request to {which} is not active, so it cannot be taken back.")
        remaining = plugged.requests - back
        if remaining:
            if centroids is None:
                raise RequestError("Other requests stay active: pass the centroids to fit a filter for them.")
            return _fit_for(remaining, plugged, centroids, clients, plugged.served.config, False, trace)
        report = Report(remaining)
        with report.stage("swap"):
            plugged.serve(None)
        return report


def purge(plugged: PluggedModel, centroids: Centroids) -> list[CellName]:
    """Destroy the cells that active requests seal: from then on they are at the server no more.

    Restoring one of several requests then needs the clients again; taking the last one back always works.
    """
    with ANSWERING:
        if not plugged.requests:
            raise RequestError("No request is active, so nothing is sealed and nothing to purge.")
        _check_belongs(plugged, centroids, plugged.requests)
        sealed = sealed_cells(centroids, plugged.requests)
        gone = union(plugged.requests)
        for cell in centroids.cells:
            if _names(gone, cell):
                centroids.put(cell, centroids.vectors[:0], centroids.counts[:0])
                centroids.purged.add(cell.name)
        centroids.sealed.clear()
        return sealed


def classes_left_without_holder(centroids: Centroids, requests: Collection[Forget]) -> list[int]:
    """Classes that nobody asked to forget and that no retained client holds: the filter will not let them pass."""
    gone = union(requests)
    held = {cell.label for cell in centroids.cells}
    kept = {cell.label for cell in centroids.cells if cell.client not in gone.client_ids}
    return sorted(held - kept - gone.class_ids)


def sealed_cells(centroids: Centroids, requests: Collection[Forget]) -> list[CellName]:
    """Cells that the server still has and uses for nothing but restoration: left out by requests, or kept originals."""
    gone = union(requests)
    left_out = {cell.name for cell in centroids.cells if _names(gone, cell) and cell.name not in centroids.purged}
    return sorted(left_out | set(centroids.sealed))


def _names(request: Forget, cell: Cell) -> bool:
    """Whether a client or class request leaves this cell out."""
    return cell.client in request.client_ids or cell.label in request.class_ids


def _several(request: Forget | Collection[Forget]) -> frozenset[Forget]:
    if not isinstance(request, Collection) or isinstance(request, str):
        request = [request]
    return frozenset(request)


def _check_new(plugged: PluggedModel, centroids: Centroids, new: frozenset[Forget]) -> None:
    """Each of the new requests must be known, change something and not be active already."""
    if not new:
        raise RequestError("There is no request to answer: the list is empty.")
    for request in new:
        check_known(request, clients=centroids.clients, num_classes=centroids.num_classes)
        if request in plugged.requests:
            raise RequestError(f"The request to {request} is active already; nothing was changed.")
        named = request.sample_ids or any(_names(request, cell) for cell in centroids.cells)
        if not named and not centroids.collected_for:
            raise RequestError(f"To {request} changes nothing: no client was trained on such a row.")


def _contact(clients: Federation | Contact | None, plugged: PluggedModel, centroids: Centroids) -> Contact | None:
    if not isinstance(clients, Federation):
        spent = Counter(centroids.ledger.charges)
        if clients is not None and spent and spent - Counter(clients.ledger.charges):
            raise SettingError(
                "The way to reach clients has a ledger that does not know what these centroids cost: make it with "
                "ledger=centroids.ledger."
            )
        return clients
    return InProcess(clients, plugged.base, one_reader=True, ledger=centroids.ledger)


def _check_arguments(plugged: object, centroids: object, requests: Iterable[object]) -> None:
    if not isinstance(plugged, PluggedModel):
        raise PlugError(
            f"The first argument must be a plugged model; found {type(plugged).__name__}: plug(model) first."
        )
    if not isinstance(centroids, Centroids | None):
        raise RequestError(f"The second argument must be what collect() returned; found {type(centroids).__name__}.")
    for request in requests:
        if not isinstance(request, Forget):
            raise RequestError(f"A request is made by Forget.clients, .classes or .samples; found {request!r}.")


def _fit_for(
    requests: frozenset[Forget],
    plugged: PluggedModel,
    centroids: Centroids,
    clients: Federation | Contact | None,
    config: FilterConfig,
    keep_sealed: bool,
    trace: Trace | None,
) -> Report:
    """The one way to a filter: a function of the set of requests, whatever the order they came in."""
    report = Report(requests)
    with report.stage("check"):
        _check_belongs(plugged, centroids, requests)
        gone = union(requests)
        check_known(gone, clients=centroids.clients, num_classes=centroids.num_classes)
        _check_shape(centroids, config)
        if config.erase_at != "auto":
            find_cut(plugged.base, config.erase_at)  # a wrong name is not kept for a later request
        contact = _contact(clients, plugged, centroids)
        before = contact.traffic if contact else Traffic()
        used = _used_cells(centroids, gone, config)
        if not used:
            raise RequestError(f"To {gone} leaves no centroid to keep. Take the model out of service instead.")
    refresh = Refresh(centroids, contact, report, keep_sealed=keep_sealed)
    plain = torch.autocast(centroids.vectors.device.type, enabled=False)  # its cached casts would hide the fit's steps
    _check_budgets(requests, gone, plugged, centroids, used, contact, config)
    with refresh.undone_on_error(), torch.inference_mode(False), plain:
        with report.stage("contact"):
            refresh.bring_up_to_date(used, gone)
        erasing = Erasing(plugged.base, plugged.cut, config, contact, report, dp=centroids.dp)
        served = plugged.served
        erasure = erasing.erasure_for(
            requests, gone, served.question if served else None, served.erasure if served else None
        )
        with report.stage("fit"):
            fitted = None
            if _needs_bottleneck(gone, config, all_erased=erasing.complete):
                fitted, report.centroids_used = _fit(
                    plugged, centroids, used, gone, config, trace, erasure, report.notes
                )
            elif (
                config.filter == "auto"
                and not centroids.dp
                and (broken := _broken_classes(plugged, centroids, used, gone))
            ):
                report.notes.append(
                    f"Class {', '.join(map(str, broken))}, as the forgotten samples were labelled, is recognised far "
                    "less often than others: their labels may have broken it. A bottleneck besides the eraser "
                    "(filter both) mends that."
                )
        with report.stage("swap"):
            base, cut = plugged.base_fingerprint, plugged.cut
            plugged.serve(Served(fitted, requests, config, base, cut, erasure, erasing.question))
    report.traffic = (contact.traffic if contact else Traffic()) - before
    centroids.bytes_up = dict(Counter(centroids.bytes_up) + Counter(report.traffic.by_client))
    return report


def _check_shape(centroids: Centroids, config: FilterConfig) -> None:
    """Refuse a bottleneck that does not fit before any client is asked, and charged."""
    dp = centroids.dp
    if config.filter == "erasure" or (dp is None and config.filter == "auto"):  # there may be no bottleneck at all
        return
    if config.class_policy == "remap_client" and dp is not None:
        raise SettingError("Under DP clients are added up before they are relabelled: use class_policy='remap'.")
    if config.per_position and dp is not None:
        raise SettingError("Under DP a filter acts on a row's features as one vector: per_position has to be off.")
    width = positions_of(centroids.shape, "each" if config.per_position else "all")[1]
    if config.rank > width:
        raise SettingError(
            f"rank {config.rank} is wider than the {width} features at the cut: use FilterConfig(rank={width}) or less."
        )


def _check_budgets(
    requests: frozenset[Forget],
    gone: Forget,
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    contact: Contact | None,
    config: FilterConfig,
) -> None:
    """Refuse unless the clients' budgets allow all releases of the answer, before the first of them."""
    dp, aside = centroids.dp, Report(requests)
    if contact is None or (dp is None and not centroids.ledger.budgets):
        return
    touched = Refresh(centroids, contact, aside, keep_sealed=False).touched(used, gone)
    erasing = Erasing(plugged.base, plugged.cut, config, contact, aside, dp=dp)
    served = plugged.served
    asked = [client for client, cells, _ in touched if cells]
    asked += erasing.clients_to_ask(requests, gone, served.question if served else None)
    if dp is None:
        contact.ledger.check_exact(asked)
    else:
        contact.ledger.check(asked, dp)


def _needs_bottleneck(gone: Forget, config: FilterConfig, *, all_erased: bool) -> bool:
    """Whether a bottleneck is fitted: as asked for; by default for clients and classes, and for samples that nothing is
    erased of (docs/cuts_and_erasure.md has the figures)."""
    if config.filter != "auto":
        return config.filter != "erasure"
    return not all_erased or bool(gone.client_ids or gone.class_ids)


@torch.no_grad()
def _broken_classes(plugged: PluggedModel, centroids: Centroids, used: list[Cell], gone: Forget) -> list[int]:
    """Classes of forgotten samples whose retained centroids the original model gets right far less often than others':
    wrong labels among the samples may have done that, and an eraser does not mend it."""
    named = {centroids.sample_labels[client][i] for client, ids in gone.sample_ids.items() for i in ids}
    rows = centroids.rows_of(used)
    labels = centroids.row_labels()[rows]
    tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
    right = torch.cat([tail(centroids.vectors[part]).argmax(1) for part in rows.split(1024)]) == labels
    recalls = {label: float(right[labels == label].float().mean()) for label in labels.unique().tolist()}
    usual = statistics.median(recalls.values())
    return sorted(label for label in named if recalls.get(label, usual) < _BROKEN * usual)


def _fit(
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    gone: Forget,
    config: FilterConfig,
    trace: Trace | None = None,
    erasure: Erasure | None = None,
    notes: list[str] | None = None,
) -> tuple[Bottleneck, int]:
    """The filter and how many centroids it was fitted to.

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
    return fit_filter(tail, examples, config, trace=trace), len(centroids.rows_of(used))


def _check_belongs(plugged: PluggedModel, centroids: Centroids, requests: frozenset[Forget]) -> None:
    plugged.check_base()
    if centroids.base != plugged.base_fingerprint or centroids.cut != plugged.cut:
        raise FingerprintError(
            f"The centroids come from base {centroids.base[:12]} at cut {centroids.cut!r}; this model is "
            f"{plugged.base_fingerprint[:12]} at cut {plugged.cut!r}. Collect centroids from this model at this cut."
        )
    missing = centroids.collected_for - requests
    if missing:
        raise RequestError(
            f"These centroids were collected for {', '.join(map(str, missing))}, which is not among the requests to "
            "serve: collect again for the requests that are, or join requests that come together with |."
        )


def _used_cells(centroids: Centroids, gone: Forget, config: FilterConfig) -> list[Cell]:
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
        counts=centroids.counts[rows],
        nonnegative=centroids.nonnegative,
        guarded=sorted(gone.class_ids) if config.class_policy == "drop" else (),
        shape=centroids.shape,
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
        counts=torch.ones_like(labels),
        nonnegative=False,
        guarded=sorted(gone.class_ids) if config.class_policy == "drop" else (),
        shape=centroids.shape,
        basis=None if basis.shape[0] == basis.shape[1] else basis,
    )


def _remapped(cell: Cell, retained: Tensor, config: FilterConfig) -> Tensor:
    """Random retained classes in place of a forgotten one: one per centroid, or one for all of the client's."""
    many = cell.size if config.class_policy == "remap" else 1
    source = generator(config.seed, "remap", cell.client, cell.label)
    return retained[torch.randint(len(retained), (many,), generator=source)].expand(cell.size)
