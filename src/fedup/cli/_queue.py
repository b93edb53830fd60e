"""Requests for the folder of a server app: answered here if no client is needed, and else queued for the server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._text import describe, of
from fedup.cli._unlearning import Wanted, describe_answer, print_answer
from fedup.errors import ContactError, HarmError, NoArchitectureError, RequestError
from fedup.filters.bottleneck import FilterConfig
from fedup.run.answer import NewRequest, RequestDesk
from fedup.run.folder import Writer
from fedup.run.in_words import forget_in_words, ids
from fedup.run.limits import Limits
from fedup.run.queue import QueueOptions, check_consistent, check_names, enqueue, enqueue_restoration
from fedup.run.state import Request, State
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Centroids
from fedup.unlearning.unlearn import plan

_NO_STATISTICS = "no statistics were collected yet"
_PERSONS = "clients alone know whose their rows are"
_SERVER_ONLY = "the program that made the folder alone can build its model (or name it with --model)"


def answer_or_queue(
    session: Session, wanted: Wanted, options: QueueOptions, *, dry_run: bool, wait_s: float
) -> dict[str, Any]:
    """Answer what needs no client, queue the rest; a dry run says which, and changes nothing."""
    if not wanted:
        raise RequestError(
            "Requests that wait for others need the clients: the server app answers them (RunServer.answer_waiting), "
            "and with each request for samples or persons that it answers. Nothing was changed."
        )
    if dry_run:
        state = session.run.read()
        known, ready, queued, _ = _sort_out(session, state, wanted, options)
        return {
            **{"dry_run": True, "already": known, "requests": [], "waiting": []},
            "at_once": [forget_in_words(own.forget, state.about) for own in ready],
            "to_queue": [{"what": forget_in_words(own.forget, state.about), "why": why} for own, why in queued],
        }
    with session.writing("unlearn", wait_s) as writer:
        state = writer.state
        known, ready, queued, parts = _sort_out(session, state, wanted, options)
        result: dict[str, Any] = {"requests": [], "already": known, "queued": [], "waiting": [], "withheld": []}
        if ready and parts:
            try:
                result |= _answer(session, writer, ready, options, parts) | {"already": known}
            except ContactError as error:
                queued += [(request, str(error)) for request in ready]
        if queued:
            entries = enqueue(writer, [request for request, _ in queued], options, facts=session.facts)
            reasons = {request.forget.digest: why for request, why in queued}
            result["queued"] = [
                {
                    **{name: entry[name] for name in ("id", "reference", "kind")},
                    "what": forget_in_words(writer.state.request(entry["id"]).forget, state.about),
                    "why": reasons[entry["digest"]],
                }
                for entry in entries
            ]
    return result


def restore_or_queue(session: Session, writer: Writer, requests: Sequence[Request], limits: Limits) -> dict[str, Any]:
    """Take requests back; in the folder of a server app what needs clients is queued, and stays in force until then."""
    state = writer.state
    # The last one needs neither centroids nor clients.
    last = all(request in requests for request in state.active) and not any(own.is_open for own in requests)
    try:
        desk = RequestDesk(writer, session.plugged(state), None, facts=session.facts)
        if not last:
            clients, judge = session.federation_if_here, session.judge()
            desk = replace(desk, centroids=session.store(state, writer), clients=clients, judge=judge)
        return describe(desk.restore(requests, limits=limits))
    except (ContactError, NoArchitectureError) as error:
        if not session.is_remote or (session.model is not None and isinstance(error, NoArchitectureError)):
            raise
        left = [own for own in (writer.state.request(request.id) for request in requests) if own.is_standing]
        options = QueueOptions(max_class_loss=limits.max_class_loss, force=limits.force)
        new = enqueue_restoration(writer, left, options, facts=session.facts)
        return {"queued": [own.id for own in left], "new": new, "declined": None, "why": str(error)}


def _answer(
    session: Session,
    writer: Writer,
    ready: Sequence[NewRequest],
    options: QueueOptions,
    parts: tuple[PluggedModel, Centroids],
) -> dict[str, Any]:
    plugged, store = parts
    state = writer.state
    desk = RequestDesk(writer, plugged, session.store(state, writer), facts=session.facts)
    config, limits = _config(plugged, options), options.limits(judged=False)
    outcome = desk.unlearn(ready, config=config, keep_sealed=options.keep_sealed, limits=limits)
    return describe_answer(outcome, outcome.entries, state, store)


def _config(plugged: PluggedModel, options: QueueOptions) -> FilterConfig:
    return replace(plugged.served.config if plugged.served else FilterConfig(), **options.settings)


def _sort_out(
    session: Session, state: State, wanted: Wanted, options: QueueOptions
) -> tuple[list[dict[str, Any]], list[NewRequest], list[tuple[NewRequest, str]], tuple[PluggedModel, Centroids] | None]:
    """Requests that are known; those to answer at once; those to queue, each with the reason; the parts to answer with.

    What no server could answer is refused here: unknown clients and classes, and requests that contradict others.
    """
    if state.is_exact:
        raise RequestError(
            "This folder is a server app's in exact mode, which has no queue: `HeadServer.unlearn` answers the request."
        )
    known, new = _new(state, wanted)
    check_consistent(state, [request.forget for request in new])
    if state.centroids is None:
        return known, [], [(request, _NO_STATISTICS) for request in new], None
    store = session.store(state)
    for request in new:
        check_names(request.forget, store.clients, store.num_classes)
    try:
        plugged = session.plugged(state)
    except NoArchitectureError as error:
        if session.model is not None:
            raise
        session.console.print(f"Note: {error}", markup=False)
        return known, [], [(request, _SERVER_ONLY) for request in new], None
    ready: list[NewRequest] = []
    queued: list[tuple[NewRequest, str]] = []
    for request in new:
        others = {own.forget for own in ready}
        why = _needs_clients(plugged, store, state.forgets | others, request, options)
        queued.append((request, why)) if why else ready.append(request)
    return known, ready, queued, (plugged, store)


def _new(state: State, wanted: Wanted) -> tuple[list[dict[str, Any]], list[NewRequest]]:
    """Requests on record already, and the others."""
    on_record = {own.forget.as_named: own for own in state.standing}
    known: list[dict[str, Any]] = []
    new: dict[Any, NewRequest] = {}
    for forget, reference in wanted:
        own = on_record.get(forget)
        if own is not None and own.is_queued:
            check_consistent(state, [forget])
        if own is not None or forget in new:
            known.append(
                {
                    "id": own and own.id,
                    "reference": own.reference if own else reference,
                    "what": forget_in_words(forget, state.about),
                    "queued": own is not None and own.is_queued,
                }
            )
        else:
            new[forget] = NewRequest(forget, reference)
    return known, list(new.values())


def _needs_clients(
    plugged: PluggedModel, store: Centroids, others: frozenset[Any], request: NewRequest, options: QueueOptions
) -> str | None:
    """Why the request cannot be answered without clients; None if it can, or can be refused."""
    if not request.forget.is_resolved:
        return _PERSONS
    try:
        planned = plan(plugged, store, others | {request.forget}, config=_config(plugged, options), force=options.force)
    except ContactError:
        return "the clients must send statistics for it"
    except HarmError:
        return None
    asked = planned.clients_contacted
    return f"client {ids(asked)} must send statistics for it" if asked else None


def print_queued(result: dict[str, Any], run: Path) -> None:
    """What was answered and what is queued, for people."""
    console = wide_console()
    if "dry_run" in result:
        for what in result["at_once"]:
            console.print(f"Would {what}, at once: no client is needed.", markup=False)
        for request in result["to_queue"]:
            console.print(f"Would queue, to {request['what']}: {request['why']}.", markup=False)
        console.print("Nothing was changed.")
        return
    waiting = [own for own in result["already"] if own.get("queued")]
    for own in waiting:
        console.print(f"To {own['what']}: {own['id']} is queued already; nothing to do.", markup=False)
    rest = {**result, "already": [own for own in result["already"] if not own.get("queued")]}
    if rest["already"] or rest["requests"]:
        print_answer(rest, run)
    for request in result["queued"]:
        name = f"{request['id']}, {escape(request['reference'])}," if request["reference"] else request["id"]
        console.print(f"[bold]{name}[/] is queued: {escape(request['what'])}. {escape(_capital(request['why']))}.")
    if result["queued"]:
        first = result["queued"][0]["id"]
        console.print(
            "Nothing is suppressed yet for what is queued; its rows are left out of later rounds of training. The next "
            "server app that opens the folder answers it (RunServer.answer_queued or serve_queue).\n"
            f"How it stands: fedup status{of(run)}. Cancel it: fedup restore {first}{of(run)}",
            soft_wrap=True,
            markup=False,
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
