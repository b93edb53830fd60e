"""`fedup restore`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli._complete import requests as known_requests
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


def restore(
    requests: Annotated[
        list[str] | None,
        typer.Argument(help="Requests to take back, by id (R1) or reference.", autocompletion=known_requests),
    ] = None,
    run: RunOption = DEFAULT_RUN,
    everything: Annotated[
        bool, typer.Option("--all", help="Take all requests back: the original model answers.")
    ] = False,
    max_loss: MaxLossOption = 3.0,
    max_class_loss: MaxClassLossOption = 5.0,
    force: ForceOption = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Take requests back: a filter for the remaining ones, and after the last the original model, bit for bit.

    Examples: [bold]fedup restore R1[/], [bold]fedup restore --all --run runs/mnist[/]
    """
    from fedup.cli._session import Session

    if bool(requests) == everything:
        raise typer.BadParameter("name the requests to take back, as in `fedup restore R1`, or pass --all.")
    result = _restore(Session(run, device=device), requests or [], (max_loss, max_class_loss), force, wait)
    if as_json:
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print(result, run)
    if result.get("declined"):
        raise typer.Exit(1)


def _restore(
    session: "Session", names: list[str], max_losses: tuple[float, float], force: bool, wait_s: float
) -> dict[str, Any]:
    from fedup.run import answer

    with session.writing("restore", wait_s) as writer:
        state = writer.state
        named = {request.id: request for request in map(state.request, names)}  # each once
        chosen = list(named.values()) if names else [*state.active, *state.open]
        back = [request for request in chosen if request.is_active or request.is_open]
        result: dict[str, Any] = {
            "requests": [request.id for request in back],
            "already": [request.id for request in chosen if request not in back],
            "filter": state.filter.id if state.filter else None,
        }
        if not back:
            return result
        taken = {request.id for request in back}
        remaining = [request for request in state.active if request.id not in taken]
        last = not remaining and not any(request.is_open for request in back)
        outcome = answer.restore(
            writer,
            session.plugged(state),
            None if last else session.store(state, writer),  # the last one needs neither centroids nor clients
            back,
            clients=None if last else session.federation_if_here,
            judge=None if last else session.judge(),
            limits=answer.Limits(max_losses[0], force, max_losses[1]),
            facts=session.facts,
        )
        return result | {
            "remaining": [request.id for request in writer.state.active],
            "declined": outcome.declined,
            "charged": any(release.name for release in outcome.report.releases),
            "filter": outcome.filter.id if outcome.filter else None,
            "base": writer.state.base,
            "clients_contacted": sorted(outcome.report.clients_contacted),
            "bytes_up": outcome.report.bytes_up,
            "time_s": outcome.report.time_s,
            "figures": outcome.figures,
        }


def _print(result: dict[str, Any], run: Path) -> None:
    from rich.markup import escape

    from fedup.cli._progress import wide_console
    from fedup.cli._text import figures_table, ids, seconds, size, why

    console = wide_console()
    if result["already"]:
        console.print(f"Taken back before: {', '.join(result['already'])}; nothing to do.", highlight=False)
    if not result["requests"]:
        if not result["already"]:
            console.print("No request is in force; nothing to do.")
        return
    names = ", ".join(result["requests"])
    if result["declined"]:
        console.print(
            f"[bold red]Not taken back:[/] {escape(why(result['declined'], 'a filter for the remaining requests'))}\n"
            "The folder serves what it served before. To take it back all the same, pass --force"
            + (" or raise --max-loss." if result["figures"] else ".")
            + (" What clients released for it is spent all the same (ε: fedup status)." if result["charged"] else ""),
            highlight=False,
        )
        return
    if not result["remaining"]:
        console.print(
            f"[bold]{names}[/] taken back; no request is in force. The original model answers, "
            f"fingerprint {result['base'][:12]} as trained, bit for bit.",
            highlight=False,
        )
        return
    console.print(f"[bold]{names}[/] taken back; in force: {', '.join(result['remaining'])}.", highlight=False)
    if result["figures"]:
        console.print(figures_table(result["figures"]))
    contacted = result["clients_contacted"]
    sent = f"client {ids(contacted)} contacted, {size(result['bytes_up'])} sent" if contacted else "no client contacted"
    console.print(f"Filter {result['filter']}; {sent}; {seconds(result['time_s'])}.", highlight=False)
