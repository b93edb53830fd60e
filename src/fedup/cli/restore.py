"""`fedup restore`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._complete import requests as known_requests
from fedup.cli._progress import wide_console
from fedup.cli._text import contact_in_words, describe, figures_table, print_declined, seconds

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.run.answer import Limits


def restore(
    requests: Annotated[
        list[str] | None,
        typer.Argument(help="Requests to take back, by id (R1) or reference.", autocompletion=known_requests),
    ] = None,
    run: options.RunOption = options.DEFAULT_RUN,
    everything: Annotated[
        bool, typer.Option("--all", help="Take all requests back: the original model answers.")
    ] = False,
    max_loss: options.MaxLossOption = 3.0,
    max_class_loss: options.MaxClassLossOption = 5.0,
    force: options.ForceOption = False,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Take requests back; after the last one the original model answers, bit for bit.

    Examples:
    [bold]fedup restore R1[/]
    [bold]fedup restore --all --run runs/mnist[/]
    """
    from fedup.cli._session import Session
    from fedup.run.answer import Limits

    if bool(requests) == everything:
        raise typer.BadParameter("name the requests to take back, as in `fedup restore R1`, or pass --all.")
    limits = Limits(max_loss, force, max_class_loss)
    result = _restore(Session(run, device=device), requests or [], limits, wait)
    options.show(result, as_json, _print)
    if result.get("declined"):
        raise typer.Exit(1)


def _restore(session: "Session", names: list[str], limits: "Limits", wait_s: float) -> dict[str, Any]:
    from fedup.run.answer import RequestDesk

    with session.writing("restore", wait_s) as writer:
        state = writer.state
        named = {request.id: request for request in map(state.request, names)}  # each once
        chosen = list(named.values()) if names else [*state.active, *state.open]
        to_restore = [request for request in chosen if request.restored_in is None]
        result: dict[str, Any] = {
            "requests": [request.id for request in to_restore],
            "already": [request.id for request in chosen if request.restored_in],
            "filter": state.filter.id if state.filter else None,
        }
        if not to_restore:
            return result
        # The last one needs neither centroids nor clients.
        last = all(request in to_restore for request in state.active) and not any(r.is_open for r in to_restore)
        desk = RequestDesk(writer, session.plugged(state), None, facts=session.facts)
        if not last:
            clients, judge = session.federation_if_here, session.judge()
            desk = replace(desk, centroids=session.store(state, writer), clients=clients, judge=judge)
        outcome = desk.restore(to_restore, limits=limits)
        in_force = [request.id for request in writer.state.active]
        return result | describe(outcome) | {"remaining": in_force, "base": writer.state.base}


def _print(result: dict[str, Any]) -> None:
    console, names = wide_console(), ", ".join(result["requests"])
    if result["already"]:
        console.print(f"Taken back before: {', '.join(result['already'])}; nothing to do.")
    if not result["requests"]:
        if not result["already"]:
            console.print("No request is in force; nothing to do.")
    elif result["declined"]:
        print_declined(console, result, done="taken back", fitted="a filter for the remaining requests")
    elif not result["remaining"]:
        console.print(
            f"[bold]{names}[/] taken back; no request is in force. The original model answers, "
            f"fingerprint {result['base'][:12]} as trained, bit for bit."
        )
    else:
        console.print(f"[bold]{names}[/] taken back; in force: {', '.join(result['remaining'])}.")
        if result["figures"]:
            console.print(figures_table(result["figures"]))
        console.print(f"Filter {result['filter']}; {contact_in_words(result)}; {seconds(result['time_s'])}.")
