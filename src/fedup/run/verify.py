"""Checks of the whole folder: chain, files, what belongs together, and that restoring gives the model, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedup.errors import FedUPError, MissingRunError, NoArchitectureError
from fedup.filters.closed_form import ClosedForm
from fedup.models.cut import logits_of
from fedup.models.views import fingerprint
from fedup.privacy.guarantee import DP
from fedup.request import union
from fedup.run.charges import CHARGING, charges_in
from fedup.run.exact import check_head, is_cohort
from fedup.run.folder import Run
from fedup.run.journal import Event
from fedup.run.ledger import describe_ledger
from fedup.run.serving import load_base, load_plugged, load_store
from fedup.run.state import State
from fedup.run.store import hash_of
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.store import Centroids
from fedup.unlearning.bottleneck_fit import names_cell

_SHORTEST_HEAD = 8
_Blank = Callable[[State], nn.Module]  # a model without its weights
_Probe = Callable[[State], Tensor]  # inputs for it


@dataclass(frozen=True)
class Check:
    """One check; `ok` is None for a note that is no mismatch."""

    name: str
    ok: bool | None
    found: str


def verify(run: Run, blank: _Blank, probe: _Probe, *, head: str | None = None) -> list[Check]:
    """All checks of a folder, with a blank model and inputs to probe it; repeated if someone wrote meanwhile."""
    while True:
        try:
            state = run.read()
        except MissingRunError:
            raise
        except FedUPError as error:
            return [Check("journal", False, str(error))]
        checks = [*_journal_checks(run, state, head), *_model_checks(run, state, blank, probe)]
        checks += _record_checks(run, state)
        if all(check.ok is not False for check in checks):
            return checks
        with suppress(FedUPError):
            if run.read().head != state.head:
                continue
        return checks


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except NoArchitectureError as error:
        return Check(name, None, f"not checked: {error}")
    except FedUPError as error:
        return Check(name, False, str(error))


def _journal_checks(run: Run, state: State, head: str | None) -> Iterator[Check]:
    """The chain, and the files on record."""
    yield Check("journal", True, f"{len(state.events)} events, chained, head {state.head}")
    if head is not None:
        known = len(head) >= _SHORTEST_HEAD and any(event.hash.startswith(head) for event in state.events)
        yield Check("head you gave", known, f"{head} is {'in' if known else 'not in'} the chain")
    backwards = sum(later.at < earlier.at for earlier, later in zip(state.events, state.events[1:], strict=False))
    if backwards:
        yield Check("clock", None, f"it went back {backwards} times; the order of events does not depend on it")
    for name, record in state.about.get("code", {}).items():
        yield _attempt(f"your own {name}", lambda record=record: f"sha256 {record['sha256']}, {run.code(record).name}")  # type: ignore[misc]
    for record in state.files:
        yield _attempt(record.name, lambda record=record: f"sha256 {run.files.path(record) and record.sha256}")  # type: ignore[misc]


def _model_checks(run: Run, state: State, blank: _Blank, probe: _Probe) -> Iterator[Check]:
    """Model, centroids and filter fit each other, and restoring gives the model's own answers."""
    if state.is_exact and state.trained is not None:
        yield _attempt("head", lambda: check_head(run, state, blank(state)))
        if not is_cohort(state):
            yield _attempt("statistics", lambda: _check_centroids(load_store(run, state), state))
        return
    if state.model is None:
        return
    yield _attempt("model", lambda: f"fingerprint {fingerprint(load_base(run, state, blank(state)))}{_which(state)}")
    if state.centroids is not None:
        yield _attempt("centroids", lambda: _check_centroids(load_store(run, state), state))
    if state.finished:
        yield _attempt("finished", lambda: _check_finished(run, state))
    yield _attempt("filter", lambda: _describe_filter(load_plugged(run, state, blank(state)), state))
    if state.filter is not None:
        yield _attempt("restore", lambda: _check_restore(run, state, blank, probe))


def _record_checks(run: Run, state: State) -> Iterator[Check]:
    """Charges, evidence pages, and files that no event names."""
    if any(event.kind in CHARGING or _under_dp(event) for event in state.events):
        yield _attempt("ledger", lambda: _check_ledger(state))
    pages = (event.body["files"] for event in state.events if event.kind == "evidenced")
    for name, sha256 in dict(file for files in pages for file in files.items()).items():  # as they were last written
        path = run.path / "evidence" / name
        if not path.exists():
            yield Check(f"evidence/{name}", None, "was written and is no longer here")
            continue
        found, _ = hash_of(path)
        same = found == sha256
        yield Check(f"evidence/{name}", same, f"sha256 {found}" + ("" if same else f", not {sha256}"))
    if leftovers := run.files.leftovers(state.files, training=state.trained is None):
        names = ", ".join(path.name for path in leftovers)
        yield Check("leftovers", None, f"{names}: the next command that writes removes them")


def _under_dp(event: Event) -> bool:
    return any(sent["guarantee"] is not None for sent in event.body.get("releases", ()))


def _check_ledger(state: State) -> str:
    """Every release under a guarantee was charged to its client, by its own name, at its full cost."""
    charged: dict[tuple[int, str], float] = {}
    for event in state.events:
        for charge in charges_in(event):
            if not charge.correction:
                charged[charge.client, charge.release] = charge.mu**2 + charge.covered
        for sent in event.body.get("releases", ()):
            if sent["guarantee"] is None:
                continue
            paid = charged.get((sent["client"], sent["name"]), 0.0) if sent["name"] else 0.0
            if paid < DP(**sent["guarantee"]).mu ** 2 * (1 - 1e-9):
                raise FedUPError(f"Client {sent['client']} released something under DP that was not charged.")
    spent = [own for own in describe_ledger(state) if own["releases"] or own["corrections"]]
    most = max(spent, key=lambda own: own["mu"])
    unprotected = sum(own["unprotected"] for own in spent)
    besides = f"; besides, {unprotected} messages were sent without any guarantee" if unprotected else ""
    return f"every release charged; the most is ε = {most['epsilon']:.4g} at δ = {most['delta']:g}{besides}"


def _describe_filter(plugged: PluggedModel, state: State) -> str:
    if plugged.served is None:
        return "none, and no request is in force"
    fitted = f"fitted for exactly the requests in force ({len(plugged.requests)})"
    return f"{fitted}{_which(state) or ', base'} {plugged.base_fingerprint[:12]}"


def _which(state: State) -> str:
    """Which base it is, where there was another before it."""
    return f", base {state.generation}" if state.generation > 1 else ""


def _check_finished(run: Run, state: State) -> str:
    """Nothing in the folder is of requests that the model was trained without, as far as statistics can show it."""
    names = ", ".join(request.id for request in state.finished)
    if state.centroids is not None:
        forget, store = union(request.forget for request in state.finished), load_store(run, state)
        cells = [cell for cell in store.cells if names_cell(forget, cell) and int(store.counts[cell.slot].sum())]
        if cells and store.targets == "classes":
            raise FedUPError(f"{names} is finished, and {len(cells)} cells of the statistics are of its rows.")
    return f"the base was trained without {names}, and no statistics are of them"


def _check_centroids(store: Centroids, state: State) -> str:
    """No kept cell holds samples that requests in force or open forget, and purged cells are empty."""
    for name in store.purged:
        cell = store.cell(name)
        if cell is not None and not store.is_empty(cell):
            raise FedUPError(f"Cell {name} was purged, and its slot is not empty.")
    if store.open != {request.forget for request in state.open}:
        raise FedUPError("The centroids leave out other open requests than those on record.")
    for request in (*state.active, *state.open):
        for client, samples in request.forget.sample_ids.items():
            left_out = {i for (holder, _), ids in store.excluded.items() if holder == client for i in ids}
            labels = store.sample_labels.get(client, {})
            held = [sample for sample in samples - left_out if not _is_absent(store, client, labels.get(sample))]
            if held:
                raise FedUPError(f"{request.id} forgets samples of client {client}, and {len(held)} are not left out.")
    return f"{int((store.counts > 0).sum())} of base {store.base[:12]}, {len(store.purged)} cells purged and empty"


def _is_absent(store: Centroids, client: int, label: int | None) -> bool:
    """Whether the store has nothing of a cell: it was purged, or had too few rows to be sent."""
    return label is not None and ((client, label) in store.purged or store.cell((client, label)) is None)


def _keeps_all(served: Served | None, answers: Tensor) -> bool:
    """Whether a closed form keeps all these classes as they were: such rows pass it unchanged."""
    fitted = served.filter if served is not None else None
    return isinstance(fitted, ClosedForm) and fitted.keeps and bool(fitted.kept[answers].all())


@torch.no_grad()
def _check_restore(run: Run, state: State, blank: _Blank, probe: _Probe) -> str:
    original, plugged = load_base(run, state, blank(state)), load_plugged(run, state, blank(state))
    inputs = probe(state)  # after the model: a folder whose model is unknown here has no known shape, either
    expected, filtered = logits_of(original(inputs)), logits_of(plugged(inputs))
    kept = _keeps_all(plugged.served, expected.argmax(1))
    with plugged.restored():
        restored = logits_of(plugged(inputs))
    unplugged = logits_of(plugged.unplug()(inputs))
    if not (torch.equal(restored, expected) and torch.equal(unplugged, expected)):
        raise FedUPError("Restored, the model does not answer as the original does.")
    if torch.equal(filtered, expected) and all(request.forget.names_rows_only for request in state.active):
        return f"bit-identical on {len(inputs)} inputs; so is the filter, which takes nothing of the samples away"
    if torch.equal(filtered, expected) and kept:
        return (
            f"bit-identical on {len(inputs)} inputs; so is the filter: it keeps every class that they are answered with"
        )
    if torch.equal(filtered, expected):
        raise FedUPError("With the filter the model answers as without it.")
    return f"bit-identical on {len(inputs)} inputs; with the filter the answers differ"
