"""Requests at the server: unlearn, restore, purge, and the plan of an answer."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fedup.clients.in_process import InProcess
from fedup.clients.protocol import Contact
from fedup.clients.subjects import resolved as resolved
from fedup.errors import HarmError, PlugError, RequestError
from fedup.federation import Federation
from fedup.filters.bottleneck import Filter, FilterConfig
from fedup.filters.presets import PresetName, preset
from fedup.request import Forget, check_known, union
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName, Centroids
from fedup.statistics.traffic import Traffic
from fedup.targets import check_request
from fedup.unlearning.bottleneck_fit import fit_bottleneck
from fedup.unlearning.closed_form_fit import fit_closed_form
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.execute import Execution
from fedup.unlearning.plan import RequestPlan, Terms, check_belongs, make_plan
from fedup.unlearning.report import Report
from fedup.unlearning.target_fit import fit_targets

_USUAL_TERMS = Terms()


def unlearn(
    plugged: PluggedModel | HeadModel,
    centroids: Centroids,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | PresetName | None = None,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
) -> Report:
    """Fit a filter for the active requests and this one (or these), and serve through it.

    Client and class requests need the centroids alone. A sample request asks the touched clients, reached through
    `clients`, to cluster the touched cells again without the samples. All clients are asked for the statistics of an
    eraser (`fedup.unlearning.eraser_builder`), unless `config` wants none. An error changes nothing.

    Before a filter is served, the recall of each class on retained rows is compared with the original's. If a class
    that nobody asked to forget would lose more than `terms` allow, or keep fewer than 20 rows, the answer is refused
    (`HarmError`); `force` serves it all the same. If clients can be reached, each new request gets a verdict
    (`report.verdicts`), measured with it and without it. Withdrawn samples that the model would know better than
    before stay open without a filter (`report.withheld`), unless `force` is given.

    Of a request that names persons, all clients are asked first which rows these are (`fedup.clients.subjects`).

    `config` may be the name of a preset; by default it is that of the served filter, or else `FilterConfig()`.

    A head that was learned on a public backbone (`learn_head`) is solved again without the rows instead.
    """
    if isinstance(plugged, HeadModel):
        _check_own_store(plugged, centroids)
        return plugged.unlearn(request, clients=clients, keep_sealed=terms.keep_sealed, force=force)
    new = _several(request)
    _check_arguments(plugged, centroids, new)
    if centroids is None:
        raise RequestError("Unlearning needs the centroids that collect() returned; found None.")
    with REQUEST_LOCK:
        contact = contact_of(clients, plugged, centroids)
        before = contact.traffic if contact else Traffic()
        with _unnamed_kept(centroids):
            new = frozenset(resolved(request, contact, centroids) for request in new)
            _check_new(plugged, centroids, new)
            if isinstance(config, str):
                config = preset(config, new).config
            config = config or (plugged.served.config if plugged.served else FilterConfig())
            report = _answer(plugged, centroids, plugged.requests | new, contact, config, terms, force=force)
        report.traffic = (contact.traffic if contact else Traffic()) - before
        return report


def plan(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    force: bool = False,
) -> RequestPlan:
    """What serving exactly this set of requests would take. Nothing is fitted, replaced or sent, and nobody is asked.

    Raises what the answer itself would raise before it asks a client.
    """
    with REQUEST_LOCK:
        config = config or FilterConfig()
        checked = make_plan(plugged, centroids, _several(requests), clients, config, _USUAL_TERMS, force=force)
        checked.clients_contacted, checked.centroids_kept, checked.cells_sealed  # noqa: B018 (computed now, or raised now)
        return checked


def rehearse(plugged: PluggedModel, centroids: Centroids, requests: Collection[Forget], config: FilterConfig) -> Filter:
    """A filter fitted for these requests to the centroids as they are, to measure and never to serve."""
    with torch.inference_mode(False), torch.autocast(centroids.device.type, enabled=False):
        if isinstance(centroids, MomentStore):
            fit = fit_closed_form if centroids.targets == "classes" else fit_targets
            return fit(plugged, centroids, union(_several(requests)))
        return fit_bottleneck(plugged, centroids, union(_several(requests)), config).filter


def restore(
    plugged: PluggedModel | HeadModel,
    centroids: Centroids | None,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
) -> Report:
    """Take requests back: the remaining ones get a new filter.

    After the last one `plugged` has no filter: serve through `plugged.unplug()`, which is the base, bit for bit. A
    request that stayed open without a filter can be taken back, too: the next answer uses its rows again.
    """
    if isinstance(plugged, HeadModel):
        _check_own_store(plugged, centroids)
        return plugged.restore(request, clients=clients)
    withdrawn = _several(request)
    _check_arguments(plugged, centroids, withdrawn)
    with REQUEST_LOCK:
        waiting = set(centroids.open) if centroids is not None else set()
        answered = {own.as_named: own for own in (*plugged.requests, *waiting)}
        withdrawn = frozenset(own if own.is_resolved else answered.get(own, own) for own in withdrawn)
        unknown = withdrawn - plugged.requests - waiting
        if unknown or not withdrawn:
            which = ", ".join(map(str, unknown)) or "nothing at all"
            raise RequestError(f"The request to {which} is not active, so it cannot be taken back.")
        remaining = plugged.requests - withdrawn
        if remaining and plugged.served is not None:
            if centroids is None:
                raise RequestError("Other requests stay active: pass the centroids to fit a filter for them.")
            open_before, centroids.open = centroids.open, centroids.open - withdrawn
            tags = union([*remaining, *centroids.open]).subject_tags
            try:
                with _unnamed_kept(centroids):
                    centroids.unnamed = {c: own & tags for c, own in centroids.unnamed.items() if own & tags}
                    return _answer(plugged, centroids, remaining, clients, plugged.served.config, terms, force=force)
            except BaseException:
                centroids.open = open_before
                raise
        report = Report(remaining)
        with report.stage("swap"):
            plugged.serve(None)
        if centroids is not None:
            centroids.open -= withdrawn
            centroids.pending, centroids.unnamed = {}, {}
        return report


def purge(plugged: PluggedModel | HeadModel, centroids: Centroids) -> list[CellName]:
    """Delete the cells that requests seal from the server, and of a delta whose changes it holds: their sum stays.

    To restore one of several requests then needs the clients again; to restore the last one always works. With a head
    that was learned on a public backbone every restoration needs them.
    """
    if isinstance(plugged, HeadModel):
        _check_own_store(plugged, centroids)
        return plugged.purge()
    with REQUEST_LOCK:
        if not plugged.requests and not centroids.open:
            raise RequestError("No request is active, so nothing is sealed and nothing to purge.")
        check_belongs(plugged, centroids, plugged.requests)
        sealed = sealed_cells(centroids, plugged.requests)
        forget_set = union(plugged.requests)
        centroids.purge(forget_set, centroids.cells_named(forget_set))
        if plugged.served is not None and plugged.served.delta is not None and not plugged.served.delta.is_merged:
            plugged.serve(replace(plugged.served, delta=plugged.served.delta.merged))
        return sealed


def classes_left_without_holder(centroids: Centroids, requests: Collection[Forget]) -> list[int]:
    """Classes that nobody asked to forget and no retained client holds: the filter will block them."""
    forget_set = union(requests)
    kept = centroids.classes_held(without=forget_set.client_ids)
    return sorted(centroids.classes_held() - kept - forget_set.class_ids)


def sealed_cells(centroids: Centroids, requests: Collection[Forget]) -> list[CellName]:
    """Cells at the server that only a restore uses: left out by requests, or originals kept aside."""
    forget_set = union(requests)
    left_out = {cell.name for cell in (*centroids.cells_named(forget_set), *centroids.cells_pending)}
    return sorted((left_out - centroids.purged) | set(centroids.sealed))


def contact_of(clients: Federation | Contact | None, plugged: PluggedModel, centroids: Centroids) -> Contact | None:
    """The way to reach the clients: of a federation, one that lives for a call."""
    if isinstance(clients, Federation):
        return InProcess(clients, plugged.base, one_reader=True, ledger=centroids.ledger)
    return clients


@contextmanager
def _unnamed_kept(centroids: Centroids) -> Iterator[None]:
    """Put back who has not named rows of persons if the block fails."""
    before = centroids.unnamed
    try:
        yield
    except BaseException:
        centroids.unnamed = before
        raise


def _several(request: Forget | Collection[Forget]) -> frozenset[Forget]:
    if not isinstance(request, Collection) or isinstance(request, str):
        request = [request]
    return frozenset(request)


def _answer(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: frozenset[Forget],
    clients: Federation | Contact | None,
    config: FilterConfig,
    terms: Terms,
    *,
    force: bool,
) -> Report:
    """The one way to a filter, which depends on the set of requests and not on their order."""
    report = Report(requests)
    with report.stage("check"):
        checked = make_plan(plugged, centroids, requests, clients, config, terms, force=force)
    return carry_out(checked, report)


def carry_out(checked: RequestPlan, report: Report) -> Report:
    """Serve a filter for a plan, and report what that took."""
    centroids, before = checked.centroids, checked.contact.traffic if checked.contact else Traffic()
    try:
        Execution(checked, report).answer()
    except HarmError as error:
        error.report = report  # it lists what clients sent
        raise
    finally:
        report.traffic = (checked.contact.traffic if checked.contact else Traffic()) - before
    for client, sent in report.traffic.by_client.items():
        centroids.bytes_up[client] = centroids.bytes_up.get(client, 0) + sent
    return report


def _check_new(plugged: PluggedModel, centroids: Centroids, new: frozenset[Forget]) -> None:
    """Refuse new requests that are unknown, change nothing or are active already."""
    if not new:
        raise RequestError("There is no request to answer: the list is empty.")
    for request in new:
        check_request(request, centroids.targets)
        check_known(request, clients=centroids.known_clients, num_classes=centroids.num_classes)
        if request in plugged.requests:
            raise RequestError(f"The request to {request} is active already; nothing was changed.")
        if not centroids.may_hold(request) and not centroids.collected_for:
            raise RequestError(f"To {request} changes nothing: no client was trained on such a row.")


def _check_own_store(model: HeadModel, store: Centroids | None) -> None:
    if store is not None and store is not model.store:
        raise RequestError("A learned head has its own statistics: pass model.store, or None.")


def _check_arguments(plugged: object, centroids: object, requests: Iterable[object]) -> None:
    if not isinstance(plugged, PluggedModel):
        raise PlugError(
            f"The first argument must be a plugged model; found {type(plugged).__name__}: plug(model) first."
        )
    if not isinstance(centroids, Centroids | None):
        raise RequestError(f"The second argument must be what collect() returned; found {type(centroids).__name__}.")
    for request in requests:
        if not isinstance(request, Forget):
            raise RequestError(
                f"A request is made by Forget.clients, .classes, .samples or .subjects; found {request!r}."
            )
