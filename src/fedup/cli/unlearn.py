"""`fedup unlearn`."""

from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fedup.cli import _options as options
from fedup.cli._settings import Settings, with_settings
from fedup.errors import RequestError

WAITING = 3  # exit status: the request is on record and waits


@with_settings(settings="fedup.filters.bottleneck.FilterConfig")
def unlearn(
    run: options.RunOption = options.DEFAULT_RUN,
    client: Annotated[
        list[str] | None, typer.Option(help="Forget this client, by name or number; may be repeated.")
    ] = None,
    class_: Annotated[
        list[str] | None, typer.Option("--class", help="Forget this class, by name or number; may be repeated.")
    ] = None,
    samples: Annotated[
        list[str] | None,
        typer.Option(
            "--samples", "--sample", help="Forget samples of a client: 3:17,42,50-60, or by id: mercy:E-12,E-40."
        ),
    ] = None,
    subject: Annotated[
        list[str] | None, typer.Option(help="Forget this person at all clients, by id; may be repeated.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="File with columns reference, client, class, sample, subject.")
    ] = None,
    pending: Annotated[bool, typer.Option("--pending", help="Answer the requests that wait, if they can be.")] = False,
    subject_key: options.SubjectKeyOption = None,
    model: options.ModelPathOption = None,
    reference: Annotated[str | None, typer.Option(help="Your own name for the request: a ticket, a letter.")] = None,
    reason: Annotated[
        str, typer.Option(help="withdrawal (rows should look unseen) or poison (their labels should not count).")
    ] = "withdrawal",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")] = False,
    max_loss: options.MaxLossOption = 3.0,
    max_class_loss: options.MaxClassLossOption = 5.0,
    force: options.ForceOption = False,
    keep_sealed: Annotated[
        bool, typer.Option("--keep-sealed", help="Keep the cells that are replaced, so that restoring asks no client.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="Settings that belong together: default, paper, or authors (the paper's code).")
    ] = None,
    *,
    settings: Settings,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Forget clients, classes, samples or persons: a filter is fitted, measured, and put in force.

    Options together are one request; a CSV file may hold many. A request in force is not asked again.
    One filter serves all requests in force; it keeps its settings unless others are given.
    A request with too few rows waits for others (exit status 3).
    In the folder of a server app, what needs clients is queued for the server (exit status 3).
    In exact mode a head is solved without the rows, and limits count only where they are given.

    Examples:
    [bold]fedup unlearn --class 7[/]
    [bold]fedup unlearn --client mercy --reference T-11[/]
    [bold]fedup unlearn --samples 3:17,42 --reference T-12 --dry-run[/]
    [bold]fedup unlearn --subject P-113 --reference T-13[/]
    [bold]fedup unlearn --csv requests.csv[/]
    """
    from fedup.cli._requests import from_csv, from_options
    from fedup.cli._session import Session
    from fedup.cli._unlearning import answer_requests, plan_answer, print_answer
    from fedup.filters.presets import preset as settings_of
    from fedup.run.limits import Limits

    given = client or [], class_ or [], samples or [], subject or []
    if sum([any(given), csv is not None, pending]) != 1:
        raise typer.BadParameter(
            "name what to forget by --client, --class or --samples, or by a --csv file; persons by --subject. "
            "--pending alone answers what waits."
        )
    session = Session(run, device=device, subject_key=subject_key, model=model)
    names = session.names()
    wanted = [(forget, reference) for forget in from_options(*given, reason, names)]
    if csv is not None:
        wanted = from_csv(csv, reason, names)
    if preset is not None:
        settings = {**asdict(settings_of(cast(Any, preset)).config), **settings}
    try:
        limits = Limits(max_loss, force, max_class_loss)
        if session.run.read().is_exact:  # the head is the one learned without the rows: a limit is the user's choice
            chosen = (
                value if options.was_given(name) else inf
                for name, value in (("max_loss", max_loss), ("max_class_loss", max_class_loss))
            )
            limits = Limits(next(chosen), force, next(chosen))
        if session.is_remote:
            from fedup.cli._queue import answer_or_queue, print_queued
            from fedup.run.queue import QueueOptions

            queued = QueueOptions(max_loss, max_class_loss, force, keep_sealed, settings)
            result = answer_or_queue(session, wanted, queued, dry_run=dry_run, wait_s=wait)
            print_answer = print_queued
        elif dry_run:
            result = plan_answer(session, wanted, settings, limits, keep_sealed=keep_sealed)
        else:
            result = answer_requests(session, wanted, settings, limits, keep_sealed=keep_sealed, wait_s=wait)
    except RequestError as error:
        raise type(error)(names.with_ids(str(error), subject or [])) from error
    options.show(result, as_json, lambda result: print_answer(result, run))
    if (result.get("declined") and not dry_run) or result.get("withheld"):
        raise typer.Exit(1)
    if (result.get("waiting") or result.get("queued")) and not dry_run:
        raise typer.Exit(WAITING)
