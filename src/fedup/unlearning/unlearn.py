"""Requests answered at the server: unlearn, restore, purge, and what they would take."""

from collections import Counter
from collections.abc import Collection, Iterable

import torch

from fedup.clients.protocol import Contact
from fedup.errors import HarmError, PlugError, RequestError
from fedup.federation import Federation
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.filters.presets import PresetName, preset
from fedup.request import Forget, check_known, union
from fedup.serving.plugged import REQUEST_LOCK, PluggedModel
from fedup.statistics.store import CellName, Centroids
from fedup.statistics.traffic import Traffic
from fedup.unlearning.bottleneck_fit import fit_bottleneck, names_cell
from fedup.unlearning.execute import Execution
from fedup.unlearning.plan import RequestPlan, Terms, check_belongs, make_plan
from fedup.unlearning.report import Report

_USUAL_TERMS = Terms()


def unlearn(
    plugged: PluggedModel,
    centroids: Centroids,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | PresetName | None = None,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
) -> Report:
    """Fit a filter for the active requests and this one (or these), and serve through it.

    Client and class requests are answered from the centroids alone. A sample request asks the touched clients, reached
    through `clients`, to cluster the touched cells again without the samples. All clients are asked for what an eraser
    needs (`fedup.unlearning.eraser_builder`), unless `config` wants none. On an error nothing has changed.

    Before a filter is served every class's recall on retained rows is compared with the original's: a class that
    nobody asked to forget may lose what `terms` allow; beyond, or where fewer than 20 of its rows would stay, the
    answer is refused (`HarmError`), and `force` serves it all the same. Where clients can be reached each new request
    gets a verdict (`report.verdicts`), measured with it and without it; withdrawn samples that would be known better
    than before stay open without a filter (`report.withheld`), unless `force` is given.

    Settings are those of `config`, which may be the name of a preset, else those of the filter that is served, else the
    default ones.
    """
    new = _several(request)
    _check_arguments(plugged, centroids, new)
    if centroids is None:
        raise RequestError("Unlearning needs the centroids that collect() returned; found None.")
    with REQUEST_LOCK:
        _check_new(plugged, centroids, new)
        if isinstance(config, str):
            config = preset(config, new).config
        config = config or (plugged.served.config if plugged.served else FilterConfig())
        return _answer(plugged, centroids, plugged.requests | new, clients, config, terms, force=force)


def plan(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    force: bool = False,
) -> RequestPlan:
    """What serving exactly this set of requests would take: nothing is fitted, replaced or sent, and nobody is asked.

    Raises what the answer itself would raise before it asks anybody.
    """
    with REQUEST_LOCK:
        config = config or FilterConfig()
        made = make_plan(plugged, centroids, _several(requests), clients, config, _USUAL_TERMS, force=force)
        made.clients_contacted, made.centroids_kept, made.cells_sealed  # noqa: B018 (as it is now, or an error)
        return made


def rehearse(
    plugged: PluggedModel, centroids: Centroids, requests: Collection[Forget], config: FilterConfig
) -> Bottleneck:
    """A filter fitted for these requests to the centroids as they are: to measure with, never to serve."""
    with torch.inference_mode(False), torch.autocast(centroids.vectors.device.type, enabled=False):
        return fit_bottleneck(plugged, centroids, union(_several(requests)), config).filter


def restore(
    plugged: PluggedModel,
    centroids: Centroids | None,
    request: Forget | Collection[Forget],
    *,
    clients: Federation | Contact | None = None,
    force: bool = False,
    terms: Terms = _USUAL_TERMS,
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
            kept, centroids.open = centroids.open, centroids.open - back
            try:
                return _answer(plugged, centroids, remaining, clients, plugged.served.config, terms, force=force)
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
        check_belongs(plugged, centroids, plugged.requests)
        sealed = sealed_cells(centroids, plugged.requests)
        forget_set = union(plugged.requests)
        for cell in centroids.cells:
            if names_cell(forget_set, cell):
                centroids.put(cell, centroids.vectors[:0], centroids.counts[:0])
                centroids.purged.add(cell.name)
        centroids.sealed.clear()
        return sealed


def classes_left_without_holder(centroids: Centroids, requests: Collection[Forget]) -> list[int]:
    """Classes that nobody asked to forget and that no retained client holds: the filter will not let them pass."""
    forget_set = union(requests)
    held = {cell.label for cell in centroids.cells}
    kept = {cell.label for cell in centroids.cells if cell.client not in forget_set.client_ids}
    return sorted(held - kept - forget_set.class_ids)


def sealed_cells(centroids: Centroids, requests: Collection[Forget]) -> list[CellName]:
    """Cells that the server still has and uses for nothing but restoration: left out by requests, or kept originals."""
    forget_set = union(requests)
    left_out = {
        cell.name for cell in centroids.cells if names_cell(forget_set, cell) and cell.name not in centroids.purged
    }
    return sorted(left_out | set(centroids.sealed))


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
    """The one way to a filter: a function of the set of requests, whatever the order they came in."""
    report = Report(requests)
    with report.stage("check"):
        made = make_plan(plugged, centroids, requests, clients, config, terms, force=force)
    before = made.contact.traffic if made.contact else Traffic()
    try:
        Execution(made, report).answer()
    except HarmError as error:
        error.report = report  # what clients told is told
        raise
    finally:
        report.traffic = (made.contact.traffic if made.contact else Traffic()) - before
    centroids.bytes_up = dict(Counter(centroids.bytes_up) + Counter(report.traffic.by_client))
    return report


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
