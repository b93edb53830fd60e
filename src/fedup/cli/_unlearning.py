"""What `fedup unlearn` does: requests told apart, answered or planned, and shown."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markup import escape

from fedup.cli._dry_run import describe_plan, print_plan
from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._settings import Settings
from fedup.cli._text import (
    contact_in_words,
    describe,
    figures_table,
    of,
    print_declined,
    print_orphaned_classes,
    seconds,
)
from fedup.cli._wording import as_command_line
from fedup.errors import RequestError
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.presets import preset
from fedup.request import Forget
from fedup.run.answer import Limits, NewRequest, RequestDesk
from fedup.run.in_words import count, eraser_in_words
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.tasks.evaluation import describe_rows
from fedup.unlearning.unlearn import classes_left_without_holder

Wanted = list[tuple[Forget, str | None]]  # what to forget, and the operator's reference


def settings_of(preset_name: str | None) -> Settings:
    """The settings of a preset, all of them; nothing where none was chosen."""
    return {} if preset_name is None else asdict(preset(cast(Any, preset_name)).config)


def _config(plugged: PluggedModel, settings: Settings) -> FilterConfig:
    """The settings of the filter in force, or the defaults, with what was chosen instead."""
    return replace(plugged.served.config if plugged.served else FilterConfig(), **settings)


def _new(session: Session, state: State, wanted: Wanted) -> tuple[list[dict[str, Any]], list[NewRequest]]:
    """Requests in force already, and those to be answered, each checked."""
    in_force = {request.forget: request for request in state.active}
    known: list[dict[str, Any]] = []
    new: dict[Forget, NewRequest] = {}
    for forget, reference in wanted:
        if forget in in_force:
            known.append({"id": in_force[forget].id, "reference": in_force[forget].reference, "what": str(forget)})
            continue
        if forget in new:
            known.append({"id": None, "reference": reference, "what": str(forget)})
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
    """What answering would take; nothing is changed."""
    state, plugged = session.served()
    known, new = _new(session, state, wanted)
    result: dict[str, Any] = {"dry_run": True, "already": known, "requests": []}
    if new:
        config = _config(plugged, settings)
        result |= describe_plan(session, (state, plugged), new, config, keep_sealed=keep_sealed, force=force)
    return result


def answer_requests(
    session: Session, wanted: Wanted, settings: Settings, limits: Limits, *, keep_sealed: bool, wait_s: float
) -> dict[str, Any]:
    """Those that are new answered by one filter for all in force, or declined."""
    with session.writing("unlearn", wait_s) as writer:
        known, new = _new(session, writer.state, wanted)
        if not new:
            in_force = writer.state.filter
            return {"requests": [], "already": known, "filter": in_force.id if in_force else None}
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
    """Either of them, for people."""
    console = wide_console()
    for known in result["already"]:
        which = f"{known['id']} is in force already, settings unchanged" if known["id"] else "named twice"
        console.print(f"To {known['what']}: {which}; nothing to do.")
    if result["requests"] and "dry_run" in result:
        print_plan(result)
    elif result["requests"] and result["declined"]:
        print_declined(console, result, done="put in force", fitted="a filter")
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
    print_orphaned_classes(console, result)
    if worst := result["worst_class"]:
        console.print(
            f"The class that loses most on retained rows is {worst['class']}: recall {worst['before']:.3f} before, "
            f"{worst['after']:.3f} with the filter."
        )
    if result["figures"]:
        console.print(figures_table(result["figures"]))


def _print_filter(result: dict[str, Any], console: Console, run: Path) -> None:
    """What it is made of, what it took, and what to do next."""
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
    if result["erasure"]:
        console.print(f"Eraser {eraser_in_words(result['erasure'])}.")
    counting, first = result["clients_counting"], result["requests"][0]["id"]
    sent = contact_in_words(result) + (f", {count(len(counting), 'client')} counted answers" if counting else "")
    fitted = f", fitted to {result['centroids_used']:,} centroids" if result["centroids_used"] else ""
    console.print(
        f"Filter {result['filter'] or 'none'}{fitted}; {sent}; {seconds(result['time_s'])}.\n"
        f"Evidence: fedup evidence {first}{of(run)}. Take it back: fedup restore {first}{of(run)}",
        soft_wrap=True,
        markup=False,
    )
