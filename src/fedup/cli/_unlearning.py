"""What `fedup unlearn` does: tell new requests from known ones, answer or plan them, and show the result."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedup.cli import _text
from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._settings import Settings
from fedup.cli._text import describe, of
from fedup.cli._wording import as_command_line
from fedup.errors import RequestError
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.run.answer import NewRequest, Outcome, RequestDesk
from fedup.run.in_words import class_in_words, count, eraser_in_words, forget_in_words, ids
from fedup.run.limits import Limits
from fedup.run.pool import Pool, sort_out
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids
from fedup.target_words import MEASURE, OUTPUT
from fedup.tasks.evaluation import describe_rows
from fedup.unlearning.unlearn import classes_left_without_holder, contact_of, plan, rehearse, resolved

_REHEARSED_STEPS = 20
Wanted = list[tuple[Forget, str | None]]  # what to forget, and the operator's reference


def _config(plugged: PluggedModel, settings: Settings) -> FilterConfig:
    """The settings of the filter in force, or the defaults, with what was chosen instead."""
    return replace(plugged.served.config if plugged.served else FilterConfig(), **settings)


def _new(session: Session, state: State, wanted: Wanted) -> tuple[list[dict[str, Any]], list[NewRequest]]:
    """Requests that are in force already or finished, and those to answer, each checked; of persons not even the rows
    are known."""
    in_force = {request.forget.as_named: request for request in (*state.finished, *state.active)}
    known: list[dict[str, Any]] = []
    new: dict[Forget, NewRequest] = {}
    for forget, reference in wanted:
        if forget in in_force or forget in new:
            own, what = in_force.get(forget), forget_in_words(forget, state.about)
            finished = own is not None and own.finished_in is not None
            reference = own.reference if own else reference
            known.append({"id": own and own.id, "reference": reference, "what": what, "finished": finished})
            continue
        request = NewRequest(forget, reference)
        new[forget] = _describe(session, state, request) if forget.is_resolved else request
    return known, list(new.values())


def _describe(session: Session, state: State, request: NewRequest) -> NewRequest:
    """The request with how many rows it names, if the data are here; checked."""
    federation, forget = session.federation_if_here, request.forget
    if federation is None:
        return request
    try:
        federation.check(forget)
    except RequestError as error:
        raise RequestError(f"{request.reference}: {error}" if request.reference else str(error)) from error
    hidden = state.guarantee is not None and not forget.names_rows_only  # counts are what DP hides
    return request if hidden else replace(request, rows=describe_rows(federation, forget))


def plan_answer(
    session: Session, wanted: Wanted, settings: Settings, limits: Limits, *, keep_sealed: bool
) -> dict[str, Any]:
    """Who would be asked, what would be replaced, what it costs in time and privacy; changes nothing."""
    force = limits.force
    if (exact := session.run.read()).is_exact:
        from fedup.cli._exact_plan import plan_exactly

        known, new = _new(session, exact, wanted)
        plain = {"dry_run": True, "already": known, "exact": True, "requests": [], **_names(exact)}
        return plain | (plan_exactly(session, new, partial(_describe, session, exact), limits) if new else {})
    state, plugged = session.served()
    known, new = _new(session, state, wanted)
    result: dict[str, Any] = {"dry_run": True, "already": known, "requests": [], "waiting": [], **_names(state)}
    if not new and wanted:
        return result
    config, clients, store = _config(plugged, settings), session.federation_if_here, session.store(state)
    contact = contact_of(clients, plugged, store)
    persons = [request.forget for request in new if not request.forget.is_resolved]
    new = [_describe(session, state, replace(own, forget=resolved(own.forget, contact))) for own in new]
    pool = Pool(new) if force else sort_out(state, store, new, contact, pending=not wanted)
    result |= {
        "waiting": [
            {"what": forget_in_words(own.forget, state.about), "why": pool.why[own.forget]} for own in pool.waiting
        ],
        "clients_resolving": list(contact.clients) if persons and contact else [],
    }
    if not pool.ready:
        return result
    requests = state.forgets | {request.forget for request in pool.ready}
    planned = plan(plugged, store, requests, clients=contact, config=config, force=force)
    sent = len(planned.cells_asked)
    collected = state.collected.body  # type: ignore[union-attr]
    per_client_s = collected["time_s"] / max(1, collected.get("senders") or len(collected["releases"]))
    expected_s = _time_of_fit(plugged, store, requests, config) + per_client_s * len(planned.clients_contacted)
    replaced = "sealed where it is the original" if keep_sealed else "destroyed"
    return result | {
        "requests": [
            {"reference": own.reference, "what": forget_in_words(own.forget, state.about), "rows": own.rows}
            for own in pool.ready
        ],
        "in_force_afterwards": len(requests),
        "classes_left_without_holder": classes_left_without_holder(store, requests),
        "would_be_measured": clients is not None,
        "cells_sealed": planned.cells_sealed,
        "cells_asked": [list(cell) for cell in planned.cells_asked],
        "samples_unknown": planned.samples_unknown,
        "clients_contacted": planned.clients_contacted,
        "centroids_kept": planned.centroids_kept,
        "statistics": store.content,
        "clients_of_eraser": planned.clients_of_eraser,
        "notes": planned.notes,
        "privacy_cost": _privacy_cost(sent, store, eraser=bool(planned.clients_of_eraser)),
        "replaced_cells": "none" if not sent or isinstance(store, MomentStore) else replaced,
        "expected_time_s": round(expected_s, 3),
    }


def answer_requests(
    session: Session, wanted: Wanted, settings: Settings, limits: Limits, *, keep_sealed: bool, wait_s: float
) -> dict[str, Any]:
    """Answer the new requests by one filter for all in force, or decline them; without any, those that wait."""
    with session.writing("unlearn", wait_s) as writer:
        state, pending = writer.state, not wanted
        known, new = _new(session, state, wanted)
        if not new and not (pending and state.waiting):
            return {"requests": [], "already": known, "filter": state.filter.id if state.filter else None}
        if state.is_exact:
            from fedup.cli._exact import unlearn_exactly

            describe_own = partial(_describe, session, state)
            answered = unlearn_exactly(session, new, describe_own, limits, keep_sealed=keep_sealed, writer=writer)
            return {**answered, "already": known, **_names(state)}
        plugged, store = session.plugged(state), session.store(state, writer)
        desk = RequestDesk(writer, plugged, store, session.federation_if_here, session.judge(), session.facts)
        desk = replace(desk, describe=partial(_describe, session, state))
        config = _config(plugged, settings)
        outcome = desk.unlearn(new, config=config, keep_sealed=keep_sealed, limits=limits, pending=pending)
        entries = outcome.entries or [request.entry for request in writer.state.waiting]
    return describe_answer(outcome, entries, state, store) | {"already": known}


def describe_answer(
    outcome: Outcome, entries: Sequence[Mapping[str, Any]], state: State, store: Centroids
) -> dict[str, Any]:
    """The outcome for programs, with its requests as the journal holds them; `state` is that before the answer."""
    report, worst = outcome.report, outcome.report.worst_class
    return describe(outcome) | {
        "requests": [_entry(entry, state.about) for entry in entries],
        "waiting": list(outcome.waiting),
        "withheld": list(outcome.withheld),
        "forced": report.forced,
        "worst_class": {"class": worst[0], **asdict(worst[1]), **_words(store)} if worst else None,
        **_names(state),
        "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
        "classes_left_without_holder": classes_left_without_holder(store, report.requests),
        "filter_sha256": outcome.filter.sha256 if outcome.filter else None,
        "centroids_used": report.centroids_used,
        "erasure": report.erasure,
        "notes": report.notes,
        "clients_counting": sorted(set(report.clients_counting)),
    }


def _words(store: Centroids) -> dict[str, str]:
    """What a class and its recall are called, as the store's model learns it."""
    return {"of": OUTPUT[store.targets], "measure": MEASURE[store.targets]}


def _names(state: State) -> dict[str, Any]:
    return {name: list(state.about.get(name, ())) for name in ("client_names", "class_names")}


def _entry(entry: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A request as the journal holds it, for programs."""
    forget = Forget.from_json(entry["forget"])
    return {
        "id": entry["id"],
        "reference": entry["reference"],
        "what": forget_in_words(forget, about),
        "reason": forget.reason,
        "rows": entry["rows"].get("count"),
        "verdict": entry.get("verdict"),
    }


def print_answer(result: dict[str, Any], run: Path) -> None:
    """An answer or a plan, for people."""
    console = wide_console()
    for known in result["already"]:
        which = f"{known['id']} is in force already, settings unchanged" if known["id"] else "named twice"
        which = f"{known['id']} is finished, the model was trained without it" if known.get("finished") else which
        console.print(f"To {known['what']}: {which}; nothing to do.", markup=False)
    if "claim" in result:
        from fedup.cli._exact import print_answered

        print_answered(result, run, done="is in force")
    elif "exact" in result:
        from fedup.cli._exact_plan import print_planned

        print_planned(result, console) if result["requests"] else console.print("Nothing was changed.")
    elif "dry_run" in result:
        _print_plan(result)
    elif result["requests"]:
        _print_requests(result, console)
        answered = [own for own in result["requests"] if own["id"] not in result["waiting"]]
        if answered and result["declined"]:
            _text.print_declined(console, result, done="put in force", fitted="a filter")
        elif answered:
            _print_costs(result, console)
            _print_filter({**result, "requests": answered}, console, run)
    elif not result["already"]:
        console.print("No request waits; nothing to do.")


def _print_requests(result: dict[str, Any], console: Console) -> None:
    """Each request with its verdict; a declined answer has none."""
    for request in result["requests"]:
        waits = request["id"] in result["waiting"]
        if result["declined"] and not waits:
            continue
        counted = request["rows"] is not None and " person" not in request["what"]  # else it says so itself
        rows = f" ({count(request['rows'], 'training row')})" if counted else ""
        name = f"{request['id']}, {escape(request['reference'])}," if request["reference"] else request["id"]
        state = "stays open, without a filter" if request["id"] in result["withheld"] else "is in force"
        state = "waits, without a filter" if waits else state
        console.print(f"[bold]{name}[/] {state}: {escape(request['what'])}{rows}.")
        if verdict := request["verdict"]:
            colour = "green" if verdict["good"] else "yellow"
            console.print(f"  Verdict: [{colour}]{escape(as_command_line(verdict['words']))}[/]")
    if result["waiting"]:
        console.print(
            "Nothing is suppressed yet for what waits: the model answers as before. Its rows are left out of later "
            "rounds of training. `fedup unlearn --pending` tries again; --force answers now, and takes the rows beside "
            "it out of the statistics."
        )


def _print_costs(result: dict[str, Any], console: Console) -> None:
    """What the filter costs others."""
    for refusal in result["forced"]:
        console.print(f"[bold red]Forced:[/] {escape(refusal)}")
    _text.print_orphaned_classes(console, result)
    if worst := result["worst_class"]:
        which = class_in_words(worst["class"], result["class_names"])
        console.print(
            f"The {worst['of']} that loses most on retained rows is {which}: {worst['measure']} "
            f"{worst['before']:.3f} before, "
            f"{worst['after']:.3f} with the filter.",
            markup=False,
        )
    if result["figures"]:
        console.print(_text.figures_table(result["figures"]))


def _print_filter(result: dict[str, Any], console: Console, run: Path) -> None:
    """The filter: what it is made of, what it took, and what to do next."""
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    if result["erasure"]:
        console.print(f"Eraser {eraser_in_words(result['erasure'])}.")
    counting, first = result["clients_counting"], result["requests"][0]["id"]
    sent = _text.contact_in_words(result) + (f", {count(len(counting), 'client')} counted answers" if counting else "")
    fitted = f", fitted to {result['centroids_used']:,} centroids" if result["centroids_used"] else ""
    console.print(
        f"Filter {result['filter'] or 'none'}{fitted}; {sent}; {_text.seconds(result['time_s'])}.\n"
        f"Evidence: fedup evidence {first}{of(run)}. Take it back: fedup restore {first}{of(run)}",
        soft_wrap=True,
        markup=False,
    )


def _privacy_cost(cells: int, store: Centroids, *, eraser: bool) -> str:
    mechanism = store.how.mechanism
    if store.dp is not None and (cells or eraser):
        releases = [f"{cells} cells sent again"] if cells else []
        releases += ["statistics for an eraser"] if eraser else []
        return f"{' and '.join(releases)}, each a release with {mechanism}, charged to its client"
    sent = [f"{cells} cells sent again, protection: {mechanism}"] if cells else []
    if eraser:
        sent.append("sums and second moments of forgotten and retained rows for an eraser, without noise")
    return "; ".join(sent) or "none: nothing is sent"


def _time_of_fit(plugged: PluggedModel, store: Centroids, requests: Any, config: FilterConfig) -> float:
    """Seconds of the fit, from a few of its steps; a closed form takes as long whatever is forgotten."""
    if isinstance(store, MomentStore):
        started = time.perf_counter()
        rehearse(plugged, store, [], config)
        return time.perf_counter() - started
    steps = config.steps_for(len(store.vectors))
    few = min(steps, _REHEARSED_STEPS)
    rehearse(plugged, store, requests, replace(config, steps=1, epochs=None))  # warms up
    started = time.perf_counter()
    rehearse(plugged, store, requests, replace(config, steps=few, epochs=None))
    return (time.perf_counter() - started) / few * steps


def _print_plan(result: dict[str, Any]) -> None:
    """A plan, for people."""
    console = wide_console()
    if asked := result.get("clients_resolving"):
        console.print(f"Would ask {count(len(asked), 'client')} which training rows are of the persons named.")
    for request in result["waiting"]:
        console.print(f"Would wait, to {request['what']}: {request['why']}.", markup=False)
    if not result["requests"]:
        console.print("Nothing was changed.")
        return
    for request in result["requests"]:
        rows, where = request["rows"], ""
        if "count" in rows:
            where = f": {count(rows['count'], 'training row')} of {count(len(rows['clients']), 'client')}"
        console.print(f"Would {request['what']}{where}.", markup=False)
    bottleneck = result["clients_of_eraser"] and result["statistics"] == "centroids"
    fitted = "A bottleneck, where one is needed," if bottleneck else "The filter"
    unknown, replaced = result["samples_unknown"], result["replaced_cells"]
    again = f"those of {unknown:,} samples, whose clients know the classes" if unknown else len(result["cells_asked"])
    before = "" if replaced == "none" else f" (what they held before: {replaced})"
    contacted = ids(result["clients_contacted"], names=result["client_names"])
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {escape(note)}")
    console.print(
        f"{fitted} would be made from about {result['centroids_kept']:,} {result['statistics']}; "
        f"{count(result['cells_sealed'], 'cell')} left out and sealed.\n"
        f"Clients contacted: {contacted or 'none'}; cells sent again: {again}{before}.\n"
        f"Privacy cost: {result['privacy_cost']}.\n"
        f"Expected time: {_short(result['expected_time_s'])}, besides loading and measuring.",
        markup=False,
    )
    _text.print_orphaned_classes(console, result)
    if not result["would_be_measured"]:
        console.print("The filter could not be measured without the data: it would be put in force with --force only.")
    console.print("Nothing was changed.")


def _short(time_s: float) -> str:
    return "less than 0.1 s" if time_s < 0.1 else f"{time_s:.1f} s"
