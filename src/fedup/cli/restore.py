"""`fedup restore`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._complete import requests as known_requests
from fedup.cli._progress import wide_console
from fedup.cli._text import contact_in_words, describe, figures_table, of, print_declined, seconds
from fedup.cli.unlearn import WAITING
from fedup.run.bases import check_not_finished


def restore(
    requests: Annotated[
        list[str] | None,
        typer.Argument(help="Requests to take back, by id (R1) or reference.", autocompletion=known_requests),
    ] = None,
    subject: Annotated[list[str] | None, typer.Option(help="Take back the request for this person.")] = None,
    subject_key: options.SubjectKeyOption = None,
    model: options.ModelPathOption = None,
    run: options.RunOption = options.DEFAULT_RUN,
    everything: Annotated[bool, typer.Option("--all", help="Take all back: the original model answers.")] = False,
    max_loss: options.MaxLossOption = 3.0,
    max_class_loss: options.MaxClassLossOption = 5.0,
    force: options.ForceOption = False,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Take requests back; after the last one the original model answers, bit for bit.

    In the folder of a server app, what needs clients is queued for the server (exit status 3).

    Examples:
    [bold]fedup restore R1[/]
    [bold]fedup restore --subject P-113[/]
    [bold]fedup restore --all --run runs/mnist[/]
    """
    from fedup.cli._session import Session
    from fedup.run.limits import Limits
    from fedup.run.queue import withdraw

    if bool(requests or subject) == everything:
        raise typer.BadParameter("name the requests to take back, as in `fedup restore R1`, or pass --all.")
    session = Session(run, device=device, subject_key=subject_key, model=model)
    limits = Limits(None if session.is_remote else max_loss, force, max_class_loss)  # no data to measure on
    with session.writing("restore", wait) as writer:
        state = writer.state
        of_persons = [state.request_for(session.names().persons([person])) for person in subject or []]
        named = {request.id: request for request in (*map(state.request, requests or []), *of_persons)}  # each once
        unanswered = (*state.waiting, *state.queued)
        chosen = [*state.active, *state.open, *unanswered] if everything else list(named.values())
        check_not_finished(chosen)
        to_restore = [request for request in chosen if request.restored_in is None and request.refusal is None]
        result: dict[str, Any] = {
            "requests": [request.id for request in to_restore],
            "already": [request.id for request in chosen if request not in to_restore],
            "filter": state.filter.id if state.filter else None,
            "client_names": list(state.about.get("client_names", ())),
        }
        if to_restore and all(request in unanswered for request in to_restore):
            result |= describe(withdraw(writer, to_restore, facts=session.facts))
        elif to_restore and state.is_exact:
            from fedup.cli._exact import restore_exactly

            result |= restore_exactly(session, to_restore, state, writer)
        elif to_restore:
            from fedup.cli._queue import restore_or_queue

            result |= restore_or_queue(session, writer, to_restore, limits)
        result |= {"remaining": [request.id for request in writer.state.active], "base": writer.state.base}
    options.show(result, as_json, lambda result: _print(result, run))
    if result.get("declined"):
        raise typer.Exit(1)
    if result.get("queued"):
        raise typer.Exit(WAITING)


def _print(result: dict[str, Any], run: Path) -> None:
    if "claim" in result:
        from fedup.cli._exact import print_answered

        print_answered(result, run, done="taken back")
        return
    console, names = wide_console(), ", ".join(result["requests"])
    if result.get("queued"):
        listed = ", ".join(result["queued"])
        done = "is queued" if result["new"] else "was queued before"
        console.print(
            f"To take back {listed} needs the clients, and {done}: the next server app that opens the folder does it "
            "(RunServer.answer_queued or serve_queue). Until then nothing changes. "
            f"How it stands: fedup status{of(run)}",
            soft_wrap=True,
            markup=False,
        )
        return
    if result["already"]:
        console.print(f"Taken back before, or refused: {', '.join(result['already'])}; nothing to do.")
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
        console.print(
            f"Filter {result['filter']}; {contact_in_words(result)}; {seconds(result['time_s'])}.", markup=False
        )
