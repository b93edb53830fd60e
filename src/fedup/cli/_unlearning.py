"""What `fedup unlearn` does: tell new requests from known ones, answer or plan them, and show the result."""

import time
from dataclasses import asdict, replace
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
from fedup.run.answer import Limits, NewRequest, RequestDesk
from fedup.run.in_words import count, eraser_in_words, ids
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids
from fedup.tasks.evaluation import describe_rows
from fedup.unlearning.unlearn import classes_left_without_holder, plan, rehearse

_REHEARSED_STEPS = 20
Wanted = list[tuple[Forget, str | None]]  # what to forget, and the operator's reference


def _config(plugged: PluggedModel, settings: Settings) -> FilterConfig:
    """The settings of the filter in force, or the defaults, with what was chosen instead."""
    return replace(plugged.served.config if plugged.served else FilterConfig(), **settings)


def _new(session: Session, state: State, wanted: Wanted) -> tuple[list[dict[str, Any]], list[NewRequest]]:
    """Requests that are in force already, and those to answer, each checked."""
    in_force = {request.forget: request for request in state.active}
    known: list[dict[str, Any]] = []
    new: dict[Forget, NewRequest] = {}
    for forget, reference in wanted:
        if forget in in_force or forget in new:
            own = in_force.get(forget)
            known.append({"id": own and own.id, "reference": own.reference if own else reference, "what": str(forget)})
            continue
        federation, rows = session.federation_if_here, {}
        if federation is not None:
            try:
                federation.check(forget)
            except RequestError as error:
                raise RequestError(f"{reference}: {error}" if reference else str(error)) from error
            if forget.kind == "sample" or state.guarantee is None:  # else counts are what DP hides
                rows = describe_rows(federation, forget)
        new[forget] = NewRequest(forget, reference, rows)
    return known, list(new.values())


def plan_answer(
    session: Session, wanted: Wanted, settings: Settings, *, keep_sealed: bool, force: bool
) -> dict[str, Any]:
    """Who would be asked, what would be replaced, what it costs in time and privacy; changes nothing."""
    if session.run.read().is_exact:
        raise RequestError("A head on a public backbone is solved in milliseconds and can be taken back: no dry run.")
    state, plugged = session.served()
    known, new = _new(session, state, wanted)
    result: dict[str, Any] = {"dry_run": True, "already": known, "requests": []}
    if not new:
        return result
    config, clients = _config(plugged, settings), session.federation_if_here
    store, requests = session.store(state), state.forgets | {request.forget for request in new}
    planned = plan(plugged, store, requests, clients=clients, config=config, force=force)
    sent = len(planned.cells_asked)
    per_client_s = state.collected.body["time_s"] / max(1, len(state.collected.body["releases"]))  # type: ignore[union-attr]
    expected_s = _time_of_fit(plugged, store, requests, config) + per_client_s * len(planned.clients_contacted)
    replaced = "sealed where it is the original" if keep_sealed else "destroyed"
    return result | {
        "requests": [{"reference": own.reference, "what": str(own.forget), "rows": own.rows} for own in new],
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
    """Answer the new requests by one filter for all in force, or decline them."""
    with session.writing("unlearn", wait_s) as writer:
        known, new = _new(session, writer.state, wanted)
        if not new:
            in_force = writer.state.filter
            return {"requests": [], "already": known, "filter": in_force.id if in_force else None}
        if writer.state.is_exact:
            from fedup.cli._exact import unlearn_exactly

            answered = unlearn_exactly(session, new, keep_sealed=keep_sealed, state=writer.state, writer=writer)
            return {**answered, "already": known}
        plugged, store = session.plugged(writer.state), session.store(writer.state, writer)
        desk = RequestDesk(writer, plugged, store, session.federation_if_here, session.judge(), session.facts)
        outcome = desk.unlearn(new, config=_config(plugged, settings), keep_sealed=keep_sealed, limits=limits)
    report, worst = outcome.report, outcome.report.worst_class
    verdicts = {digest: verdict.to_json() for digest, verdict in report.verdicts.items()}
    return describe(outcome) | {
        "requests": [
            {
                "id": name,
                "reference": request.reference,
                "what": str(request.forget),
                "reason": request.forget.reason,
                "rows": request.rows.get("count"),
                "verdict": verdicts.get(request.forget.digest),
            }
            for name, request in zip(outcome.requests, new, strict=True)
        ],
        "already": known,
        "withheld": list(outcome.withheld),
        "forced": report.forced,
        "worst_class": {"class": worst[0], **asdict(worst[1])} if worst else None,
        "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
        "classes_left_without_holder": classes_left_without_holder(store, report.requests),
        "filter_sha256": outcome.filter.sha256 if outcome.filter else None,
        "centroids_used": report.centroids_used,
        "erasure": report.erasure,
        "notes": report.notes,
        "clients_counting": sorted(set(report.clients_counting)),
    }


def print_answer(result: dict[str, Any], run: Path) -> None:
    """An answer or a plan, for people."""
    console = wide_console()
    for known in result["already"]:
        which = f"{known['id']} is in force already, settings unchanged" if known["id"] else "named twice"
        console.print(f"To {known['what']}: {which}; nothing to do.")
    if "claim" in result:
        from fedup.cli._exact import print_answered

        print_answered(result, run, done="is in force")
    elif result["requests"] and "dry_run" in result:
        _print_plan(result)
    elif result["requests"] and result["declined"]:
        _text.print_declined(console, result, done="put in force", fitted="a filter")
    elif result["requests"]:
        _print_requests(result, console)
        _print_filter(result, console, run)


def _print_requests(result: dict[str, Any], console: Console) -> None:
    """Each request with its verdict, and what the filter costs."""
    for request in result["requests"]:
        rows = f" ({count(request['rows'], 'training row')})" if request["rows"] is not None else ""
        name = f"{request['id']}, {escape(request['reference'])}," if request["reference"] else request["id"]
        state = "stays open, without a filter" if request["id"] in result["withheld"] else "is in force"
        console.print(f"[bold]{name}[/] {state}: {request['what']}{rows}.")
        if verdict := request["verdict"]:
            colour = "green" if verdict["good"] else "yellow"
            console.print(f"  Verdict: [{colour}]{as_command_line(verdict['words'])}[/]")
    for refusal in result["forced"]:
        console.print(f"[bold red]Forced:[/] {escape(refusal)}")
    _text.print_orphaned_classes(console, result)
    if worst := result["worst_class"]:
        console.print(
            f"The class that loses most on retained rows is {worst['class']}: recall {worst['before']:.3f} before, "
            f"{worst['after']:.3f} with the filter."
        )
    if result["figures"]:
        console.print(_text.figures_table(result["figures"]))


def _print_filter(result: dict[str, Any], console: Console, run: Path) -> None:
    """The filter: what it is made of, what it took, and what to do next."""
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
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
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
    console.print(
        f"{fitted} would be made from about {result['centroids_kept']:,} {result['statistics']}; "
        f"{count(result['cells_sealed'], 'cell')} left out and sealed.\n"
        f"Clients contacted: {ids(result['clients_contacted']) or 'none'}; cells sent again: {again}{before}.\n"
        f"Privacy cost: {result['privacy_cost']}.\n"
        f"Expected time: {result['expected_time_s']:.1f} s, besides loading and measuring."
    )
    _text.print_orphaned_classes(console, result)
    if not result["would_be_measured"]:
        console.print("The filter could not be measured without the data: it would be put in force with --force only.")
    console.print("Nothing was changed.")
