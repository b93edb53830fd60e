"""Requests answered at the server: unlearn, restore, purge."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedup.centroids import Cell, CellName, Centroids, insert, message_size
from fedup.contact import Contact, InProcess
from fedup.cut import flat_tail
from fedup.errors import ContactError, FingerprintError, PlugError, RequestError
from fedup.federation import Federation
from fedup.filter import FilterConfig
from fedup.fit import Examples, Trace, fit_filter
from fedup.plugging import ANSWERING, PluggedModel, Served
from fedup.request import Forget, check_known, union
from fedup.rng import generator
from fedup.sharing import shared_view


@dataclass
class Report:
    """What answering a request took."""

    requests: frozenset[Forget]  # active afterwards
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    clients_contacted: list[int] = field(default_factory=list)
    bytes_up: int = 0  # clients to server, as serialised
    bytes_down: int = 0
    centroids_used: int = 0

    @property
    def total_time_s(self) -> float:
        """Seconds from request to effect."""
        return sum(self.time_s.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.time_s[name] = self.time_s.get(name, 0.0) + time.perf_counter() - started


def unlearn(
    plugged: PluggedModel,
    centroids: Centroids,
    request: Forget,
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    keep_sealed: bool = False,
    trace: Trace | None = None,
) -> Report:
    """Fit a filter for the active requests and this one, and serve through it.

    Client and class requests are answered from the centroids alone. A sample request asks the touched clients, reached
    through `clients`, to cluster the touched cells again without the samples; the old cells are replaced, and kept
    aside for a restoration without contact only with `keep_sealed`. On an error nothing has changed.
    """
    _check_arguments(plugged, centroids, request)
    if centroids is None:
        raise RequestError("Unlearning needs the centroids that collect() returned; found None.")
    with ANSWERING:
        check_known(request, clients=centroids.clients, num_classes=centroids.num_classes)
        if request in plugged.requests:
            raise RequestError(f"The request to {request} is active already; nothing was changed.")
        if (
            not centroids.collected_for
            and not request.sample_ids
            and not any(_names(request, c) for c in centroids.cells)
        ):
            raise RequestError(f"To {request} changes nothing: no client was trained on such a row.")
        config = config or (plugged.served.config if plugged.served else FilterConfig())
        return _fit_for(plugged.requests | {request}, plugged, centroids, clients, config, keep_sealed, trace)


def restore(
    plugged: PluggedModel,
    centroids: Centroids | None,
    request: Forget,
    *,
    clients: Federation | Contact | None = None,
    trace: Trace | None = None,
) -> Report:
    """Take one request back: a filter for the remaining ones, or none, and the original model, after the last.

    After the last one `plugged` has no filter: serve through `plugged.unplug()`, which is the base, bit for bit.
    """
    _check_arguments(plugged, centroids, request)
    with ANSWERING:
        if request not in plugged.requests or plugged.served is None:
            raise RequestError(f"The request to {request} is not active, so it cannot be taken back.")
        remaining = plugged.requests - {request}
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
        gone = union(plugged.requests)
        if not gone.kind:
            raise RequestError("No request is active, so nothing is sealed and nothing to purge.")
        _check_belongs(plugged, centroids, plugged.requests)
        sealed = [cell for cell in centroids.cells if _names(gone, cell)]
        for cell in sealed:
            centroids.put(cell, centroids.vectors[:0], centroids.counts[:0])
            centroids.purged.add(cell.name)
        originals = list(centroids.sealed)
        centroids.sealed.clear()
        return sorted({*(cell.name for cell in sealed), *originals})


def _names(request: Forget, cell: Cell) -> bool:
    """Whether a client or class request leaves this cell out."""
    return cell.client in request.client_ids or cell.label in request.class_ids


def _check_arguments(plugged: object, centroids: object, request: object) -> None:
    if not isinstance(plugged, PluggedModel):
        raise PlugError(
            f"The first argument must be a plugged model; found {type(plugged).__name__}: plug(model) first."
        )
    if not isinstance(centroids, Centroids | None):
        raise RequestError(f"The second argument must be what collect() returned; found {type(centroids).__name__}.")
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
        contact = InProcess(clients, plugged.base) if isinstance(clients, Federation) else clients
        used = _used_cells(centroids, gone, config)
        if not used:
            raise RequestError(f"To {gone} leaves no centroid to keep. Take the model out of service instead.")
    refresh = _Refresh(centroids, contact, report, keep_sealed=keep_sealed)
    plain = torch.autocast(centroids.vectors.device.type, enabled=False)  # its cached casts would hide the fit's steps
    with refresh.undone_on_error(), torch.inference_mode(False), plain:
        with report.stage("contact"):
            refresh.bring_up_to_date(used, gone)
        with report.stage("fit"):
            examples = _examples(centroids, used, gone, config)
            report.centroids_used = len(examples.rows)
            tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
            fitted = fit_filter(tail, examples, config, trace=trace)
        with report.stage("swap"):
            plugged.serve(Served(fitted, requests, config, plugged.base_fingerprint, plugged.cut))
    return report


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
    )


def _remapped(cell: Cell, retained: Tensor, config: FilterConfig) -> Tensor:
    """Random retained classes in place of a forgotten one: one per centroid, or one for all of the client's."""
    many = cell.size if config.class_policy == "remap" else 1
    source = generator(config.seed, "remap", cell.client, cell.label)
    return retained[torch.randint(len(retained), (many,), generator=source)].expand(cell.size)


class _Refresh:
    """Brings the cells in use to the state that the requests ask for, and back if something fails."""

    def __init__(self, centroids: Centroids, contact: Contact | None, report: Report, *, keep_sealed: bool) -> None:
        self.centroids = centroids
        self.contact = contact
        self.report = report
        self.keep_sealed = keep_sealed
        self._undo: list[Callable[[], object]] = []

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for step in reversed(self._undo):
                step()
            raise

    def bring_up_to_date(self, used: list[Cell], gone: Forget) -> None:
        by_client: dict[int, list[Cell]] = {client: [] for client in gone.sample_ids}
        for cell in used:
            by_client.setdefault(cell.client, []).append(cell)
        for client, cells in by_client.items():
            self._bring_client_up_to_date(client, cells, gone.sample_ids.get(client, frozenset()))

    def _bring_client_up_to_date(self, client: int, used: list[Cell], wanted: frozenset[int]) -> None:
        """Touched are cells in use that were purged or leave out other samples than they should, and sealed ones that
        still hold samples to be left out."""
        store = self.centroids
        labels = self._labels_of(client, wanted)
        should = {(client, label): frozenset(i for i in wanted if labels[i] == label) for label in labels.values()}
        touched = [
            cell
            for cell in used
            if cell.name in store.purged or self._left_out(cell) != should.get(cell.name, frozenset())
        ]
        for name, ids in should.items():
            cell = store.cell(name)
            if cell is not None and cell not in used and name not in store.purged and ids - self._left_out(cell):
                touched.append(cell)
        asked = [cell for cell in touched if should.get(cell.name) or not self._unseal(cell)]
        if asked:
            self._ask(client, asked, wanted)

    def _left_out(self, cell: Cell) -> frozenset[int]:
        return self.centroids.excluded.get(cell.name, frozenset())

    def _labels_of(self, client: int, samples: frozenset[int]) -> dict[int, int]:
        """The samples' classes: asked once, then known."""
        known = self.centroids.sample_labels.get(client, {})
        unknown = samples - known.keys()
        if not unknown:
            return known
        labels, found = self.centroids.sample_labels, {**known, **self._reach().labels_of(client, unknown)}
        self._undo.append(lambda: labels.update({client: known}) if known else labels.pop(client))
        labels[client] = found
        self._note_contact(client, {"samples": sorted(unknown)})
        return found

    def _unseal(self, cell: Cell) -> bool:
        """Put the sealed original back, if it was kept."""
        store = self.centroids
        original = store.sealed.get(cell.name)
        if original is None:
            return False
        self._remember(cell)
        store.put(cell, *original)
        store.excluded.pop(cell.name, None)
        del store.sealed[cell.name]
        return True

    def _ask(self, client: int, cells: list[Cell], excluded: frozenset[int]) -> None:
        store = self.centroids
        labels_of = store.sample_labels.get(client, {})
        labels = frozenset(cell.label for cell in cells)
        summary = self._reach().summarize(client, cut=store.cut, how=store.how, labels=labels, excluded=excluded)
        for cell in cells:
            self._remember(cell)
            untouched = cell.name not in store.excluded and cell.name not in store.purged
            if self.keep_sealed and untouched:
                store.sealed[cell.name] = store.take(cell)
            elif not self.keep_sealed and {i for i in excluded if labels_of[i] == cell.label} - self._left_out(cell):
                store.sealed.pop(cell.name, None)  # it holds samples that are left out from now on
        insert(store, summary)
        self.report.bytes_up += message_size(summary)
        self._note_contact(client, {"labels": sorted(labels), "excluded": sorted(excluded), "cut": store.cut})

    def _note_contact(self, client: int, question: dict[str, object]) -> None:
        if client not in self.report.clients_contacted:
            self.report.clients_contacted.append(client)
        self.report.bytes_down += len(json.dumps({"client": client, **question}).encode())

    def _remember(self, cell: Cell) -> None:
        store, name = self.centroids, cell.name
        content, excluded = store.take(cell), store.excluded.get(name)
        purged, sealed, sent = name in store.purged, store.sealed.get(name), store.bytes_up.get(cell.client, 0)

        def put_back() -> None:
            store.put(cell, *content)
            store.bytes_up[cell.client] = sent
            store.excluded.pop(name, None)
            store.sealed.pop(name, None)
            store.purged.discard(name)
            if excluded is not None:
                store.excluded[name] = excluded
            if sealed is not None:
                store.sealed[name] = sealed
            if purged:
                store.purged.add(name)

        self._undo.append(put_back)

    def _reach(self) -> Contact:
        if self.contact is None:
            raise ContactError(
                "This needs an answer from clients (samples to leave out, or cells that were replaced or purged), and "
                "no way to reach them was given: pass clients=federation."
            )
        return self.contact
