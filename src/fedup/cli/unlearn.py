"""`fedup unlearn`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._settings import Settings, with_settings

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.filters.bottleneck import FilterConfig
    from fedup.request import Forget
    from fedup.run.answer import Limits, NewRequest
    from fedup.run.state import State
    from fedup.serving.plugged import PluggedModel

    Wanted = list[tuple[Forget, str | None]]  # what to forget, and the operator's reference


@with_settings(settings="fedup.filters.bottleneck.FilterConfig")
def unlearn(
    run: options.RunOption = options.DEFAULT_RUN,
    client: Annotated[list[int] | None, typer.Option(help="Forget this client; may be repeated.", min=0)] = None,
    class_: Annotated[
        list[int] | None, typer.Option("--class", help="Forget this class; may be repeated.", min=0)
    ] = None,
    samples: Annotated[
        list[str] | None,
        typer.Option("--samples", "--sample", help="Forget samples of a client: 3:17,42,50-60; may be repeated."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Requests from a file with columns reference, client, class, sample.")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Your own name for the request: a ticket, a letter.")] = None,
    reason: Annotated[
        str, typer.Option(help="withdrawal (rows are to look unseen) or poison (their labels are to lose their hold).")
    ] = "withdrawal",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")] = False,
    max_loss: options.MaxLossOption = 3.0,
    max_class_loss: options.MaxClassLossOption = 5.0,
    force: options.ForceOption = False,
    keep_sealed: Annotated[
        bool, typer.Option("--keep-sealed", help="Keep replaced cells, so that taking back needs no client for them.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="default, paper or authors (of the paper's code): settings that belong together.")
    ] = None,
    *,
    settings: Settings,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Forget clients, classes or samples: a filter is fitted, measured, and put in force.

    A request that is in force already changes nothing. Options together are one request; a CSV file may hold many.

    There is one filter for all requests in force: its settings are those of the filter before, unless given.

    Examples: [bold]fedup unlearn --class 7[/], [bold]fedup unlearn --samples 3:17,42 --reference T-12 --dry-run[/],
    [bold]fedup unlearn --csv requests.csv[/]
    """
    from fedup.cli._requests import from_csv, from_options
    from fedup.cli._session import Session
    from fedup.run.answer import Limits

    wanted: Wanted = [(forget, reference) for forget in from_options(client or [], class_ or [], samples or [], reason)]
    if bool(wanted) == bool(csv):
        raise typer.BadParameter("name what to forget by --client, --class or --samples, or by a --csv file.")
    if csv is not None:
        wanted = from_csv(csv, reason)
    settings = {**_preset(preset), **settings}
    session = Session(run, device=device)
    if dry_run:
        result = _plan(session, wanted, settings, keep_sealed=keep_sealed, force=force)
    else:
        limits = Limits(max_loss, force, max_class_loss)
        result = _answer(session, wanted, settings, limits, keep_sealed=keep_sealed, wait_s=wait)
    options.show(result, as_json, lambda result: _print(result, run, dry_run=dry_run))
    if result.get("declined") or result.get("withheld"):
        raise typer.Exit(1)


def _preset(name: str | None) -> Settings:
    """The settings of a preset, all of them; nothing where none was chosen."""
    from dataclasses import asdict
    from typing import cast

    from fedup.filters.presets import preset

    return {} if name is None else asdict(preset(cast(Any, name)).config)


def _config(plugged: "PluggedModel", settings: Settings) -> "FilterConfig":
    """The settings of the filter in force, or the defaults, with what was chosen instead."""
    from dataclasses import replace

    from fedup.filters.bottleneck import FilterConfig

    return replace(plugged.served.config if plugged.served else FilterConfig(), **settings)


def _new(session: "Session", state: "State", wanted: "Wanted") -> "tuple[list[dict[str, Any]], list[NewRequest]]":
    """Requests in force already, and those to be answered, each checked."""
    from fedup.errors import RequestError
    from fedup.run.answer import NewRequest
    from fedup.tasks.evaluation import describe_rows

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


def _plan(
    session: "Session", wanted: "Wanted", settings: Settings, *, keep_sealed: bool, force: bool
) -> dict[str, Any]:
    from fedup.cli._dry_run import describe_plan

    state, plugged = session.served()
    known, new = _new(session, state, wanted)
    result: dict[str, Any] = {"dry_run": True, "already": known, "requests": []}
    if new:
        config = _config(plugged, settings)
        result |= describe_plan(session, (state, plugged), new, config, keep_sealed=keep_sealed, force=force)
    return result


def _answer(
    session: "Session", wanted: "Wanted", settings: Settings, limits: "Limits", *, keep_sealed: bool, wait_s: float
) -> dict[str, Any]:
    from dataclasses import asdict

    from fedup.cli._answer import describe
    from fedup.run import answer
    from fedup.unlearning.unlearn import classes_left_without_holder

    with session.writing("unlearn", wait_s) as writer:
        known, new = _new(session, writer.state, wanted)
        if not new:
            in_force = writer.state.filter
            return {"requests": [], "already": known, "filter": in_force.id if in_force else None}
        plugged, store = session.plugged(writer.state), session.store(writer.state, writer)
        outcome = answer.unlearn(
            writer,
            plugged,
            store,
            new,
            clients=session.federation_if_here,
            config=_config(plugged, settings),
            keep_sealed=keep_sealed,
            judge=session.judge(),
            limits=limits,
            facts=session.facts,
        )
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


def _print(result: dict[str, Any], run: Path, *, dry_run: bool) -> None:
    from fedup.cli._answer import print_declined
    from fedup.cli._dry_run import print_plan
    from fedup.cli._progress import wide_console

    console = wide_console()
    for known in result["already"]:
        which = f"{known['id']} is in force already, settings unchanged" if known["id"] else "named twice"
        console.print(f"To {known['what']}: {which}; nothing to do.")
    if result["requests"] and dry_run:
        print_plan(result)
    elif result["requests"] and result["declined"]:
        print_declined(console, result, done="put in force", fitted="a filter")
    elif result["requests"]:
        _print_requests(result, console)
        _print_filter(result, console, run)


def _print_requests(result: dict[str, Any], console: Any) -> None:
    """Each request with its verdict, and what the filter costs."""
    from rich.markup import escape

    from fedup.cli._answer import print_orphaned_classes
    from fedup.cli._text import figures_table
    from fedup.cli._wording import as_command_line
    from fedup.run.in_words import count

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


def _print_filter(result: dict[str, Any], console: Any, run: Path) -> None:
    """What it is made of, what it took, and what to do next."""
    from fedup.cli._answer import contact_in_words
    from fedup.cli._text import of, seconds
    from fedup.run.in_words import count

    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
    if result["erasure"]:
        place = result["erasure"]["place"]
        console.print(
            f"Eraser at {place['cut']}, {place['positions']} of {place['of']} positions, made of "
            f"{result['erasure']['rows']:,} forgotten rows: {place['cover']:.0%} of what sets these apart goes, and "
            f"{place['price']:.1%} of the variance with it."
        )
    counting, first = result["clients_counting"], result["requests"][0]["id"]
    sent = contact_in_words(result) + (f", {count(len(counting), 'client')} counted answers" if counting else "")
    fitted = f", fitted to {result['centroids_used']:,} centroids" if result["centroids_used"] else ""
    console.print(
        f"Filter {result['filter'] or 'none'}{fitted}; {sent}; {seconds(result['time_s'])}.\n"
        f"Evidence: fedup evidence {first}{of(run)}. Take it back: fedup restore {first}{of(run)}",
        soft_wrap=True,
        markup=False,
    )
