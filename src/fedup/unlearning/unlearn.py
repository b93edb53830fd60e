"""Requests answered at the server: unlearn, restore, purge, and what they would take."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from fedup.clients.in_process import InProcess
from fedup.clients.protocol import Contact
from fedup.errors import FingerprintError, HarmError, PlugError, RequestError, SettingError
from fedup.federation import Federation
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.filters.fit import Trace
from fedup.filters.presets import PresetName
from fedup.filters.presets import preset as settings_of
from fedup.models.cut import find_cut
from fedup.request import Forget, check_known, union
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel
from fedup.statistics.store import Cell, CellName, Centroids
from fedup.statistics.traffic import Traffic
from fedup.unlearning.bottleneck_fit import fit_bottleneck, names_cell, used_cells
from fedup.unlearning.class_recall import check_classes_left
from fedup.unlearning.eraser_builder import EraserBuilder
from fedup.unlearning.execute import Execution, Terms, check_leaves_something
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report


def unlearn(
    plugged: PluggedModel,
    centroids: Centroids,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    preset: PresetName | None = None,
    keep_sealed: bool = False,
    force: bool = False,
    max_class_loss: float = 5.0,
    measure: bool | None = None,
    trace: Trace | None = None,
) -> Report:
    """Fit a filter for the active requests and this one (or these), and serve through it.

    Client and class requests are answered from the centroids alone. A sample request asks the touched clients, reached
    through `clients`, to cluster the touched cells again without the samples; the old cells are replaced, and kept
    aside only with `keep_sealed`: restoring then asks nobody, unless other samples stay erased. All clients are
    asked for what an eraser needs (`fedup.unlearning.eraser_builder`), unless `config` wants none. On an error nothing
    has changed.

    Before a filter is served every class's recall on retained rows is compared with the original's: a class that
    nobody asked to forget may lose `max_class_loss` points; beyond, or where fewer than 20 of its rows would stay, the
    answer is refused (`HarmError`), and `force` serves it all the same. Where clients can be reached each new request
    gets a verdict (`report.verdicts`), measured with it and without it; withdrawn samples that would be known better
    than before stay open without a filter (`report.withheld`), unless `force` is given. `measure` asks clients for the
    verdict, or does not; by default they are asked where they are in this process, and for samples.

    Settings are those of `config`, or of a `preset`, else those of the filter that is served, else the default ones.
    """
    new = _several(request)
    _check_arguments(plugged, centroids, new)
    if centroids is None:
        raise RequestError("Unlearning needs the centroids that collect() returned; found None.")
    terms = Terms(force=force, max_class_loss=max_class_loss, measure=measure, keep_sealed=keep_sealed)
    with REQUEST_LOCK:
        _check_new(plugged, centroids, new)
        if config is not None and preset is not None:
            raise SettingError("Pass config= or preset=, not both: a preset is a config.")
        if preset is not None:
            config = settings_of(preset, new).config
        config = config or (plugged.served.config if plugged.served else FilterConfig())
        return _answer(plugged.requests, new, plugged, centroids, clients, config, terms, trace)


@dataclass(frozen=True)
class Plan:
    """What answering requests would take, found without changing anything or asking anybody."""

    cells_sealed: int  # left out by the requests, and used for nothing but restoration
    cells_asked: list[CellName]  # clustered again by their clients, as far as it is known
    samples_unknown: int  # of which only their clients know the class, and so the cell
    clients_contacted: list[int]
    centroids_kept: int  # rows that the filter is fitted to, before clients replace any
    clients_of_eraser: list[int]  # asked for statistics of forgotten and retained rows
    notes: list[str]  # for people


def plan(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    force: bool = False,
) -> Plan:
    """What serving exactly this set of requests would take: nothing is fitted, replaced or sent, and nobody is asked.

    Raises what the answer itself would raise before it asks anybody.
    """
    requests = _several(requests)
    with REQUEST_LOCK:
        report, config = Report(requests), config or FilterConfig()
        contact = _check(requests, plugged.requests, plugged, centroids, clients, config, Terms(force=force), report)
        gone, left_out = union(requests), union([*requests, *centroids.open])
        used = used_cells(centroids, gone, config)
        asked = [cell for _, cells, _ in _outlook(centroids, used, left_out) for cell in cells]
        asks = EraserBuilder(plugged.base, plugged.cut, config, contact, report, dp=centroids.dp)
        erasing = asks.clients_to_ask(requests, left_out, plugged.served.question if plugged.served else None)
        unknown = _unknown_samples(centroids, left_out)
        contacted = {*unknown, *(cell.client for cell in asked), *erasing}
        return Plan(
            cells_sealed=sum(names_cell(gone, cell) for cell in centroids.cells),
            cells_asked=[cell.name for cell in asked],
            samples_unknown=sum(len(ids) for ids in unknown.values()),
            clients_contacted=sorted(contacted),
            clients_of_eraser=erasing,
            notes=report.notes,
            centroids_kept=len(centroids.rows_of(used)),
        )


def rehearse(
    plugged: PluggedModel, centroids: Centroids, requests: Collection[Forget], config: FilterConfig
) -> Bottleneck:
    """A filter fitted for these requests to the centroids as they are: to measure with, never to serve."""
    gone = union(_several(requests))
    with torch.inference_mode(False), torch.autocast(centroids.vectors.device.type, enabled=False):
        return fit_bottleneck(plugged, centroids, used_cells(centroids, gone, config), gone, config)[0]


def restore(
    plugged: PluggedModel,
    centroids: Centroids | None,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    force: bool = False,
    max_class_loss: float = 5.0,
    trace: Trace | None = None,
) -> Report:
    """Take a request (or several) back: a filter for the remaining ones; after the last none, and the original model.

    After the last one `plugged` has no filter: serve through `plugged.unplug()`, which is the base, bit for bit. One
    that stayed open without a filter can be taken back, too: its rows are used again from the next answer on.
    """
    back = _several(request)
    _check_arguments(plugged, centroids, back)
    with REQUEST_LOCK:
        waiting = set(centroids.open) if centroids is not None else set()
        unknown = back - plugged.requests - waiting
        if unknown or not back:
            which = ", ".join(map(str, unknown)) or "nothing at all"
            raise RequestError(f"The request to {which} is not active, so it cannot be taken back.")
        remaining = plugged.requests - back
        if remaining and plugged.served is not None:
            if centroids is None:
                raise RequestError("Other requests stay active: pass the centroids to fit a filter for them.")
            terms = Terms(force=force, max_class_loss=max_class_loss)
            kept, centroids.open = centroids.open, centroids.open - back
            try:
                return _answer(remaining, frozenset(), plugged, centroids, clients, plugged.served.config, terms, trace)
            except BaseException:
                centroids.open = kept
                raise
        report = Report(remaining)
        with report.stage("swap"):
            plugged.serve(None)
        if centroids is not None:
            centroids.open -= back
        return report


def purge(plugged: PluggedModel, centroids: Centroids) -> list[CellName]:
    """Destroy the cells that requests seal: from then on they are at the server no more.

    Restoring one of several requests then needs the clients again; taking the last one back always works.
    """
    with REQUEST_LOCK:
        if not plugged.requests and not centroids.open:
            raise RequestError("No request is active, so nothing is sealed and nothing to purge.")
        _check_belongs(plugged, centroids, plugged.requests)
        sealed = sealed_cells(centroids, plugged.requests)
        gone = union(plugged.requests)
        for cell in centroids.cells:
            if names_cell(gone, cell):
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
    left_out = {cell.name for cell in centroids.cells if names_cell(gone, cell) and cell.name not in centroids.purged}
    return sorted(left_out | set(centroids.sealed))


def _several(request: Forget | Collection[Forget]) -> frozenset[Forget]:
    if not isinstance(request, Collection) or isinstance(request, str):
        request = [request]
    return frozenset(request)


def _answer(
    active: frozenset[Forget],
    new: frozenset[Forget],
    plugged: PluggedModel,
    centroids: Centroids,
    clients: Federation | Contact | None,
    config: FilterConfig,
    terms: Terms,
    trace: Trace | None,
) -> Report:
    """The one way to a filter: a function of the set of requests, whatever the order they came in."""
    report = Report(active | new)
    with report.stage("check"):
        contact = _check(active | new, active, plugged, centroids, clients, config, terms, report)
    before = contact.traffic if contact else Traffic()
    try:
        Execution(plugged, centroids, contact, config, terms, report, trace).answer(active, new)
    except HarmError as error:
        error.report = report  # what clients told is told
        raise
    finally:
        report.traffic = (contact.traffic if contact else Traffic()) - before
    centroids.bytes_up = dict(Counter(centroids.bytes_up) + Counter(report.traffic.by_client))
    return report


def _check(
    requests: frozenset[Forget],
    active: frozenset[Forget],
    plugged: PluggedModel,
    centroids: Centroids,
    clients: Federation | Contact | None,
    config: FilterConfig,
    terms: Terms,
    report: Report,
) -> Contact | None:
    """All that can be refused before anybody is asked; how to reach clients."""
    _check_belongs(plugged, centroids, requests)
    gone = union(requests)
    check_known(gone, clients=centroids.clients, num_classes=centroids.num_classes)
    _check_shape(centroids, config)
    if config.eraser_cut != "auto":
        find_cut(plugged.base, config.eraser_cut)  # a wrong name is not kept for a later request
    contact = _contact(clients, plugged, centroids)
    used = used_cells(centroids, gone, config)
    check_leaves_something(used, gone)
    _check_releases(requests, plugged, centroids, used, contact, config, force=terms.force)
    if not terms.force:
        left_out, before = union([gone, *centroids.open]), union([*active, *centroids.open])
        check_classes_left(centroids, left_out, before)
    return contact


def _check_new(plugged: PluggedModel, centroids: Centroids, new: frozenset[Forget]) -> None:
    """Each of the new requests must be known, change something and not be active already."""
    if not new:
        raise RequestError("There is no request to answer: the list is empty.")
    for request in new:
        check_known(request, clients=centroids.clients, num_classes=centroids.num_classes)
        if request in plugged.requests:
            raise RequestError(f"The request to {request} is active already; nothing was changed.")
        named = request.sample_ids or any(names_cell(request, cell) for cell in centroids.cells)
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


def _check_shape(centroids: Centroids, config: FilterConfig) -> None:
    """Refuse a bottleneck that does not fit before any client is asked, and charged."""
    dp = centroids.dp
    if config.filter == "erasure":
        return
    if config.class_policy == "remap_client" and dp is not None:
        raise SettingError("Under DP clients are added up before they are relabelled: use class_policy='remap'.")
    config.rank_for(math.prod(centroids.shape))  # raises if too wide


def _check_releases(
    requests: frozenset[Forget],
    plugged: PluggedModel,
    centroids: Centroids,
    used: list[Cell],
    contact: Contact | None,
    config: FilterConfig,
    *,
    force: bool,
) -> None:
    """Refuse an eraser that cannot be made or checked, and what the clients' budgets do not allow, before the first
    release."""
    dp = centroids.dp
    if contact is None:
        return
    left_out = union([*requests, *centroids.open])
    erasing = EraserBuilder(plugged.base, plugged.cut, config, contact, Report(requests), dp=dp)
    served = plugged.served
    of_eraser = erasing.clients_to_ask(requests, left_out, served.question if served else None)
    if dp is not None and of_eraser and not force:
        raise HarmError(
            "Under differential privacy nobody can be asked what an eraser does to each class, so it is made and "
            "served with force=True only; filter='bottleneck' needs none. Nothing was changed or released."
        )
    if dp is None and not centroids.ledger.budgets:
        return
    asked = [client for client, cells, _ in _outlook(centroids, used, left_out) if cells]
    asked += [client for client in _unknown_samples(centroids, left_out) if client not in asked]
    asked += of_eraser
    if dp is None:
        contact.ledger.check_exact(asked)
    else:
        contact.ledger.check(asked, dp)


def _outlook(centroids: Centroids, used: list[Cell], gone: Forget) -> list[tuple[int, list[Cell], list[Cell]]]:
    """The cells that clients would be asked for, as far as it is known without asking."""
    return Refresh(centroids, None, Report(frozenset()), keep_sealed=False).touched(used, gone, ask=False)


def _unknown_samples(centroids: Centroids, gone: Forget) -> dict[int, frozenset[int]]:
    """By client: samples of which the server does not know the class; under DP it never asks."""
    if centroids.dp is not None:
        return {}
    known = centroids.sample_labels
    unknown = {client: ids - known.get(client, {}).keys() for client, ids in gone.sample_ids.items()}
    return {client: ids for client, ids in unknown.items() if ids}


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
