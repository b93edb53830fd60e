"""Requests that need the clients: queued in the folder by anyone, answered by the server that reaches the clients."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fedup.errors import (
    ArtifactError,
    BusyError,
    ChangedError,
    ContactError,
    FedUPError,
    RequestError,
    StorageError,
)
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget, check_known, union
from fedup.run.answer import NewRequest, Outcome, RequestDesk, contact_facts, described_requests
from fedup.run.folder import Run, Writer
from fedup.run.limits import Limits
from fedup.run.lock import held, holder
from fedup.run.state import Request, State
from fedup.unlearning.report import Report
from fedup.unlearning.verdict import waits

SERVING = "serving"  # a file of the folder, locked by the process that answers a queued request
_WAIT_S = 600.0
_TRIES = 5  # while others change the folder
_QUEUED = "it needs the clients, and is queued for the server that reaches them"
Status = Literal["answered", "open", "waiting", "refused", "postponed", "withdrawn", "restored", "not restored"]


@dataclass(frozen=True)
class QueueOptions:
    """How a queued request is answered: as the options of `fedup unlearn` say. Without a judge at the server the loss
    of accuracy is not limited. `settings` are those of FilterConfig that differ from the filter in force."""

    max_loss: float = 3.0
    max_class_loss: float = 5.0
    force: bool = False
    keep_sealed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def limits(self, *, judged: bool) -> Limits:
        """What the filter may cost."""
        return Limits(self.max_loss if judged else None, self.force, self.max_class_loss)

    def to_json(self) -> dict[str, Any]:
        """As it stands in an event."""
        return asdict(replace(self, settings=dict(self.settings)))


@dataclass(frozen=True)
class Served:
    """What became of a queued request; `why` says so for one that was refused or postponed."""

    id: str
    status: Status
    why: str | None = None
    outcome: Outcome | None = None


def enqueue(
    writer: Writer, new: Sequence[NewRequest], options: QueueOptions, *, facts: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Put new requests on record, to be answered by the server. Returns them as the journal holds them."""
    check_consistent(writer.state, [request.forget for request in new])
    entries = described_requests(writer.state, new)
    verdict = waits(_QUEUED).to_json()
    for entry in entries:
        entry |= {"verdict": verdict, "withheld": False, "notes": []}
    body = {**contact_facts(Report(frozenset())), "forced": [], "time_s": {}, "base": writer.state.base}
    writer.commit("queued", {**(facts or {}), "requests": entries, "options": options.to_json(), **body})
    return entries


def withdraw(writer: Writer, requests: Sequence[Request], *, facts: Mapping[str, Any] | None = None) -> Outcome:
    """Take back requests that no filter answers yet: queued ones, and those that wait for others."""
    ids = [request.id for request in requests]
    writer.commit("withdrawn", {**(facts or {}), "requests": ids})
    return Outcome(ids, writer.state.filter, Report(writer.state.forgets), None)


def enqueue_restoration(
    writer: Writer, requests: Sequence[Request], options: QueueOptions, *, facts: Mapping[str, Any] | None = None
) -> list[str]:
    """Put on record that the server is to take these requests back; they stay in force until it has. Returns those that
    were not on record before."""
    new = [request.id for request in requests if not request.is_returning]
    if new:
        writer.commit("restore queued", {**(facts or {}), "requests": new, "options": options.to_json()})
    return new


def describe_queue(run: Run, state: State) -> dict[str, Any]:
    """What is queued, in service and refused, for `fedup status`."""
    served = in_service(run)
    return {
        "queued": [{"id": own.id, "postponed": own.postponed} for own in state.queued],
        "returning": [{"id": own.id, "postponed": own.postponed} for own in state.returning],
        "in_service": served if served and served["request"] in [own.id for own in to_serve(state)] else None,
        "refused": [{"id": own.id, "why": own.refusal} for own in state.requests if own.refusal is not None],
    }


def check_consistent(state: State, new: Sequence[Forget]) -> None:
    """Refuse requests that contradict each other, or those on record."""
    known = {own.forget.as_named: own for own in (*state.queued, *state.waiting, *state.open)}
    for forget in new:
        own = known.get(forget.as_named)
        if own is not None and own.forget.reason != forget.reason:
            raise RequestError(
                f"{own.id} asks for the same with the reason {own.forget.reason!r}, and this request says "
                f"{forget.reason!r}. Take {own.id} back first. Nothing was changed."
            )
    if state.collected is None:
        return
    together = union([state.left_out, *new])
    clients, classes = clients_of(state), state.about.get("class_names") or ()
    if clients and clients <= together.client_ids:
        raise RequestError(f"To {together}, as all requests together ask, leaves no client. Nothing was changed.")
    if classes and len(together.class_ids) >= len(classes):
        raise RequestError(f"To {together}, as all requests together ask, leaves no class. Nothing was changed.")


def check_names(forget: Forget, clients: Sequence[int], num_classes: int) -> None:
    """Refuse unknown clients and classes. Of persons only the nodes know."""
    named = replace(forget, subject_tags=frozenset(), resolved_tags=frozenset())
    if named.kind:
        check_known(named, clients=clients, num_classes=num_classes)


def clients_of(state: State) -> set[int]:
    """The clients whose statistics the folder holds, as the journal knows them."""
    return {int(sent["client"]) for sent in state.collected.body["releases"]} if state.collected else set()


def to_serve(state: State) -> tuple[Request, ...]:
    """What the server that reaches the clients is to do: requests to take back, and then those to answer."""
    return *state.returning, *state.queued


def options_of(request: Request) -> QueueOptions:
    """The options that a queued request came with, or the wish to take it back."""
    return QueueOptions(**(request.returning or request.asked_in).body["options"])


def serve(run: Run, request_id: str, open_desk: Callable[[str], AbstractContextManager[RequestDesk]]) -> Served:
    """Answer one queued request, or take one back. It is planned anew with what the folder holds now, and done wholly
    or not at all.

    If clients cannot be reached it stays queued (`postponed`); what cannot be answered at all is refused, with the
    reason on record. A folder that is damaged raises.
    """
    why = "other processes keep changing the folder"
    for _ in range(_TRIES):
        request = run.read().request(request_id)
        if not (request.is_queued or request.is_returning):
            return _found(request)
        try:
            with held(run.path / SERVING, f"serve {request.id}"):
                outcome = _answer(request, open_desk)
            return replace(_found(run.read().request(request_id)), outcome=outcome)
        except ChangedError:
            continue
        except BusyError as error:
            return Served(request_id, "postponed", str(error))
        except (ContactError, StorageError) as error:
            why = str(error)
            break
        except ArtifactError:
            raise
        except FedUPError as error:
            return _note(run, request_id, "refused", str(error))
    return _note(run, request_id, "postponed", why)


def _answer(request: Request, open_desk: Callable[[str], AbstractContextManager[RequestDesk]]) -> Outcome:
    options = options_of(request)
    limits = options.limits
    with open_desk(request.id) as desk:
        if request.is_returning:
            outcome = desk.restore([request], limits=limits(judged=desk.judge is not None))
            if outcome.declined is not None:
                raise RequestError(outcome.declined)
            return outcome
        served = desk.plugged.served
        config = replace(served.config if served else FilterConfig(), **options.settings)
        return desk.unlearn(
            [NewRequest(request.forget, request.reference, request.entry["rows"])],
            config=config,
            keep_sealed=options.keep_sealed,
            limits=limits(judged=desk.judge is not None),
        )


def _found(request: Request) -> Served:
    """What became of a request, by what is on record."""
    if request.refusal is not None:
        return Served(request.id, "refused", request.refusal)
    states: dict[Status, bool] = {
        "restored": request.restored_in is not None and request.returning is not None,
        "withdrawn": request.restored_in is not None,
        "postponed": request.is_queued,
        "waiting": request.is_waiting,
        "open": request.is_open,
    }
    why = request.postponed if request.is_queued else None
    return Served(request.id, next((status for status, holds in states.items() if holds), "answered"), why)


def _note(run: Run, request_id: str, kind: Literal["postponed", "refused"], why: str) -> Served:
    """Put on record why a request is not answered; the same reason is not written twice."""
    with run.writing("serve", wait_s=_WAIT_S) as writer:
        request = writer.state.request(request_id)
        if not (request.is_queued or request.is_returning):
            return _found(request)
        if kind == "refused" or request.postponed != why:
            writer.commit(kind, {"requests": [request.id], "why": why})
    return Served(request_id, "not restored" if request.is_returning and kind == "refused" else kind, why)


def in_service(run: Run) -> dict[str, str] | None:
    """The queued request that a process answers now, and that process in words; None if there is none."""
    path = run.path / SERVING
    who = holder(path)
    try:
        command = json.loads(path.read_text(encoding="utf-8"))["command"] if who else ""
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {"request": str(command).partition(" ")[2], "by": str(who)} if command else None
