"""`fedup unlearn`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli._options import (
    DEFAULT_RUN,
    DEFAULT_WAIT_S,
    DeviceOption,
    ForceOption,
    JsonOption,
    MaxClassLossOption,
    MaxLossOption,
    RunOption,
    ThreadsOption,
    WaitOption,
)

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.filters.bottleneck import FilterConfig
    from fedup.run.answer import NewRequest


def unlearn(
    run: RunOption = DEFAULT_RUN,
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
    max_loss: MaxLossOption = 3.0,
    max_class_loss: MaxClassLossOption = 5.0,
    force: ForceOption = False,
    keep_sealed: Annotated[
        bool, typer.Option("--keep-sealed", help="Keep replaced cells, so that taking back needs no client for them.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(help="Width of the filter's bottleneck (32, or the features where fewer).", min=1)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the fit (300).", min=1)] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Weight of the classes against the features, 0 to 1 (0.5).")
    ] = None,
    class_policy: Annotated[
        str | None,
        typer.Option(
            help="drop (default: nothing of a forgotten class is used), remap or remap_client (it is relabelled)."
        ),
    ] = None,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter", help="auto (default: an eraser for samples, else a bottleneck), bottleneck, erasure or both."
        ),
    ] = None,
    eraser_cut: Annotated[
        str | None, typer.Option(help="Cut of the eraser (auto); `fedup list cuts MODEL` names them.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="default, paper or authors (of the paper's code): settings that belong together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the fit.")] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Forget clients, classes or samples: a filter is fitted, measured, and put in force.

    A request that is in force already changes nothing. Options together are one request; a CSV file may hold many.

    There is one filter for all requests in force: its settings are those of the filter before, unless given.

    Examples: [bold]fedup unlearn --class 7[/], [bold]fedup unlearn --samples 3:17,42 --reference T-12 --dry-run[/],
    [bold]fedup unlearn --csv requests.csv[/]
    """
    from fedup.cli._requests import from_csv, from_options
    from fedup.cli._session import Session

    wanted = [(forget, reference) for forget in from_options(client or [], class_ or [], samples or [], reason)]
    if bool(wanted) == bool(csv):
        raise typer.BadParameter("name what to forget by --client, --class or --samples, or by a --csv file.")
    if csv is not None:
        wanted = from_csv(csv, reason)
    chosen = {
        "rank": rank,
        "steps": steps,
        "alpha": alpha,
        "class_policy": class_policy,
        "seed": seed,
        "filter": filter_,
        "eraser_cut": eraser_cut,
    }
    given = {**_preset(preset), **{name: value for name, value in chosen.items() if value is not None}}
    session = Session(run, device=device)
    if dry_run:
        result = _plan(session, wanted, given, keep_sealed, force)
    else:
        result = _answer(session, wanted, given, keep_sealed, (max_loss, max_class_loss), force, wait)
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print_plan(result) if dry_run else _print_answer(result, run)
    if result.get("declined") or result.get("withheld"):
        raise typer.Exit(1)


def _new(session: "Session", state: Any, wanted: list[Any]) -> tuple[list[dict[str, Any]], "list[NewRequest]"]:
    """Requests in force already, and those to be answered, each checked."""
    from fedup.run.answer import NewRequest
    from fedup.tasks.evaluation import describe_rows

    in_force = {request.forget: request for request in state.active}
    known, new = [], {}
    for forget, reference in wanted:
        if forget in in_force:
            known.append({"id": in_force[forget].id, "reference": in_force[forget].reference, "what": str(forget)})
        elif forget in new:
            known.append({"id": None, "reference": reference, "what": str(forget)})
        else:
            federation = session.federation_if_here
            if federation is not None:
                _check(federation, forget, reference)
            told = forget.kind == "sample" or state.guarantee is None  # else counts are what DP hides
            rows = describe_rows(federation, forget) if federation is not None and told else {}
            new[forget] = NewRequest(forget, reference, rows)
    return known, list(new.values())


def _check(federation: Any, forget: Any, reference: str | None) -> None:
    from fedup.errors import RequestError

    try:
        federation.check(forget)
    except RequestError as error:
        raise RequestError(f"{reference}: {error}" if reference else str(error)) from error


def _config(plugged: Any, chosen: dict[str, Any]) -> "FilterConfig":
    """The settings of the filter in force, or the defaults, with what was chosen instead."""
    from dataclasses import replace

    from fedup.filters.bottleneck import FilterConfig

    base = plugged.served.config if plugged.served else FilterConfig()
    return replace(base, **chosen)


def _preset(name: str | None) -> dict[str, Any]:
    """The settings of a preset, all of them; nothing where none was chosen."""
    from dataclasses import asdict
    from typing import cast

    from fedup.filters.presets import preset

    return {} if name is None else asdict(preset(cast(Any, name)).config)


def _answer(
    session: "Session",
    wanted: list[Any],
    chosen: dict[str, Any],
    keep_sealed: bool,
    max_losses: tuple[float, float],
    force: bool,
    wait_s: float,
) -> dict[str, Any]:
    from dataclasses import asdict

    from fedup.run import answer
    from fedup.unlearning.unlearn import classes_left_without_holder

    with session.writing("unlearn", wait_s) as writer:
        known, new = _new(session, writer.state, wanted)
        if not new:
            return {"requests": [], "already": known, "filter": _filter_id(writer.state.filter)}
        plugged, store = session.plugged(writer.state), session.store(writer.state, writer)
        outcome = answer.unlearn(
            writer,
            plugged,
            store,
            new,
            clients=session.federation_if_here,
            config=_config(plugged, chosen),
            keep_sealed=keep_sealed,
            judge=session.judge(),
            limits=answer.Limits(max_losses[0], force, max_losses[1]),
            facts=session.facts,
        )
        return {
            "requests": [
                {
                    "id": name,
                    "reference": one.reference,
                    "what": str(one.forget),
                    "reason": one.forget.reason,
                    "rows": one.rows.get("count"),
                    "verdict": _verdict(outcome.report, one.forget),
                }
                for name, one in zip(outcome.requests, new, strict=True)
            ],
            "already": known,
            "declined": outcome.declined,
            "withheld": list(outcome.withheld),
            "forced": outcome.report.forced,
            "worst_class": _worst_class(outcome.report),
            "class_recall": {str(label): asdict(recall) for label, recall in outcome.report.class_recall.items()},
            "charged": bool(outcome.report.releases) and store.dp is not None,
            "classes_left_without_holder": classes_left_without_holder(store, outcome.report.requests),
            "filter": _filter_id(outcome.filter),
            "filter_sha256": outcome.filter.sha256 if outcome.filter else None,
            "centroids_used": outcome.report.centroids_used,
            "erasure": outcome.report.erasure,
            "notes": outcome.report.notes,
            "clients_contacted": sorted(outcome.report.clients_contacted),
            "clients_counting": sorted(set(outcome.report.clients_counting)),
            "bytes_up": outcome.report.bytes_up,
            "time_s": outcome.report.time_s,
            "figures": outcome.figures,
        }


def _verdict(report: Any, forget: Any) -> dict[str, Any] | None:
    verdict = report.verdicts.get(forget.digest)
    return verdict.to_json() if verdict else None


def _worst_class(report: Any) -> dict[str, Any] | None:
    from dataclasses import asdict

    worst = report.worst_class
    return {"class": worst[0], **asdict(worst[1])} if worst else None


def _plan(
    session: "Session", wanted: list[Any], chosen: dict[str, Any], keep_sealed: bool, force: bool
) -> dict[str, Any]:
    from fedup.unlearning.unlearn import classes_left_without_holder, plan

    state, plugged = session.served()
    known, new = _new(session, state, wanted)
    result: dict[str, Any] = {"dry_run": True, "already": known, "requests": []}
    if not new:
        return result
    store, config = session.store(state), _config(plugged, chosen)
    requests = state.forgets | {one.forget for one in new}
    found = plan(plugged, store, requests, clients=session.federation_if_here, config=config, force=force)
    sent = len(found.cells_asked)
    return result | {
        "requests": [{"reference": one.reference, "what": str(one.forget), "rows": one.rows} for one in new],
        "in_force_afterwards": len(requests),
        "classes_left_without_holder": classes_left_without_holder(store, requests),
        "would_be_measured": session.federation_if_here is not None,
        "cells_sealed": found.cells_sealed,
        "cells_asked": [list(cell) for cell in found.cells_asked],
        "samples_unknown": found.samples_unknown,
        "clients_contacted": found.clients_contacted,
        "centroids_kept": found.centroids_kept,
        "clients_of_eraser": found.clients_of_eraser,
        "notes": found.notes,
        "privacy_cost": _privacy_cost(
            sent, store.how.mechanism, found.clients_of_eraser, guaranteed=store.dp is not None
        ),
        "replaced_cells": "none" if not sent else "sealed where it is the original" if keep_sealed else "destroyed",
        "expected_time_s": _expected_time(plugged, store, requests, config, state, found),
    }


def _privacy_cost(cells: int, mechanism: str, eraser: list[int], *, guaranteed: bool) -> str:
    if guaranteed and (cells or eraser):
        releases = [f"{cells} cells sent again"] if cells else []
        releases += ["statistics for an eraser"] if eraser else []
        return f"{' and '.join(releases)}, each a release with {mechanism}, charged to its client"
    sent = [f"{cells} cells sent again, protection: {mechanism}"] if cells else []
    if eraser:
        sent.append("sums and second moments of forgotten and retained rows for an eraser, without noise")
    return "; ".join(sent) or "none: nothing is sent"


def _expected_time(plugged: Any, store: Any, requests: Any, config: Any, state: Any, found: Any) -> float:
    """A few steps of the very fit, measured and multiplied, and each client's share of the collection."""
    import time
    from dataclasses import replace

    from fedup.unlearning.unlearn import rehearse

    steps = config.steps_for(len(store.vectors))
    few = min(steps, 20)
    rehearse(plugged, store, requests, replace(config, steps=1, epochs=None))  # loads what is loaded on first use
    started = time.perf_counter()
    rehearse(plugged, store, requests, replace(config, steps=few, epochs=None))
    fit_s = (time.perf_counter() - started) / few * steps
    per_client_s = state.collected.body["time_s"] / max(1, len(state.collected.body["releases"]))
    return round(fit_s + per_client_s * len(found.clients_contacted), 3)


def _filter_id(record: Any) -> str | None:
    return record.id if record else None


def _print_plan(result: dict[str, Any]) -> None:
    from fedup.cli._progress import wide_console
    from fedup.cli._text import ids

    console = wide_console()
    _print_known(result, console)
    for one in result["requests"]:
        rows = one["rows"].get("count")
        where = _of_rows(rows, one["rows"]["clients"]) if rows is not None else ""
        console.print(f"Would {one['what']}{where}.", highlight=False, markup=False)
    if result["requests"]:
        for note in result["notes"]:
            console.print(f"[yellow]Note:[/] {note}", highlight=False)
        fitted = "A bottleneck, where one is needed," if result["clients_of_eraser"] else "The filter"
        console.print(
            f"{fitted} would be fitted to about {result['centroids_kept']:,} centroids; {result['cells_sealed']} "
            f"cells left out and sealed.\nClients contacted: {ids(result['clients_contacted']) or 'none'}; cells "
            f"clustered again: {_cells_again(result)}{_old_content(result)}.\n"
            f"Privacy cost: {result['privacy_cost']}.\nExpected time: {result['expected_time_s']:.1f} s, besides "
            "loading and measuring.",
            highlight=False,
        )
        _print_orphans(result, console)
        if not result["would_be_measured"]:
            console.print(
                "The filter could not be measured without the data: it would be put in force with --force only."
            )
        console.print("Nothing was changed.")


def _cells_again(result: dict[str, Any]) -> str:
    known, unknown = len(result["cells_asked"]), result["samples_unknown"]
    return f"those of {unknown:,} samples, whose clients know the classes" if unknown else str(known)


def _old_content(result: dict[str, Any]) -> str:
    kept = result["replaced_cells"]
    return "" if kept == "none" else f" (what they held before: {kept})"


def _print_eraser(result: dict[str, Any], console: Any) -> None:
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}", highlight=False)
    if result["erasure"]:
        place = result["erasure"]["place"]
        console.print(
            f"Eraser at {place['cut']}, {place['positions']} of {place['of']} positions, made of "
            f"{result['erasure']['rows']:,} forgotten rows: {place['cover']:.0%} of what sets these apart goes, and "
            f"{place['price']:.1%} of the variance with it.",
            highlight=False,
        )


def _print_orphans(result: dict[str, Any], console: Any) -> None:
    from fedup.cli._text import ids

    if result["classes_left_without_holder"]:
        console.print(
            f"[yellow]Note:[/] no retained client holds class {ids(result['classes_left_without_holder'])}, which "
            "nobody asked to forget: the filter will not let it pass, and no validation row shows it.",
            highlight=False,
        )


def _of_rows(rows: int, clients: Any) -> str:
    from fedup.cli._text import count

    return f": {count(rows, 'training row')} of {count(len(clients), 'client')}"


def _print_verdict(verdict: dict[str, Any] | None, console: Any) -> None:
    from fedup.cli._wording import as_command_line

    if verdict:
        colour = "green" if verdict["good"] else "yellow"
        console.print(f"  Verdict: [{colour}]{as_command_line(verdict['words'])}[/]", highlight=False)


def _print_worst_class(result: dict[str, Any], console: Any) -> None:
    worst = result["worst_class"]
    if worst:
        console.print(
            f"The class that loses most on retained rows is {worst['class']}: recall {worst['before']:.3f} before, "
            f"{worst['after']:.3f} with the filter.",
            highlight=False,
        )


def _print_known(result: dict[str, Any], console: Any) -> None:
    for one in result["already"]:
        which = f"{one['id']} is in force already, settings unchanged" if one["id"] else "named twice"
        console.print(f"To {one['what']}: {which}; nothing to do.", highlight=False)


def _print_answer(result: dict[str, Any], run: Path) -> None:
    from rich.markup import escape

    from fedup.cli._progress import wide_console
    from fedup.cli._text import count, figures_table, ids, of, seconds, size, why

    console = wide_console()
    _print_known(result, console)
    if not result["requests"]:
        return
    if result["declined"]:
        console.print(
            f"[bold red]Not put in force:[/] {escape(why(result['declined'], 'a filter'))}\nThe folder serves what "
            "it served before. To put it in force all the same, pass --force"
            + (" or raise --max-loss." if result["figures"] else ".")
            + (" What clients released for it is spent all the same (ε: fedup status)." if result["charged"] else ""),
            highlight=False,
        )
        return
    for one in result["requests"]:
        rows = f" ({count(one['rows'], 'training row')})" if one["rows"] is not None else ""
        name = f"{one['id']}, {escape(one['reference'])}," if one["reference"] else one["id"]
        state = "stays open, without a filter" if one["id"] in result["withheld"] else "is in force"
        console.print(f"[bold]{name}[/] {state}: {one['what']}{rows}.", highlight=False)
        _print_verdict(one["verdict"], console)
    for what in result["forced"]:
        console.print(f"[bold red]Forced:[/] {escape(what)}", highlight=False)
    _print_orphans(result, console)
    _print_worst_class(result, console)
    if result["figures"]:
        console.print(figures_table(result["figures"]))
    contacted = result["clients_contacted"]
    sent = f"client {ids(contacted)} contacted, {size(result['bytes_up'])} sent" if contacted else "no client contacted"
    if result["clients_counting"]:
        sent += f", {count(len(result['clients_counting']), 'client')} counted answers"
    _print_eraser(result, console)
    fitted = f", fitted to {result['centroids_used']:,} centroids" if result["centroids_used"] else ""
    console.print(
        f"Filter {result['filter'] or 'none'}{fitted}; {sent}; "
        f"{seconds(result['time_s'])}.\nEvidence: fedup evidence {result['requests'][0]['id']}{of(run)}. "
        f"Take it back: fedup restore {result['requests'][0]['id']}{of(run)}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
