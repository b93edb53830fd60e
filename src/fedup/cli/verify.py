"""`fedup verify`."""

import re
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedup.cli import _options as options
from fedup.cli._progress import wide_console

_LONG_HASH = re.compile(r"\b([0-9a-f]{16})[0-9a-f]{48}\b")


def verify(
    run: options.RunOption = options.DEFAULT_RUN,
    head: Annotated[str | None, typer.Option(help="A head hash that must be in the chain: 8 digits or more.")] = None,
    relearn: Annotated[
        bool, typer.Option("--relearn", help="Exact mode: the remaining clients add up anew; hashes must be equal.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Exact mode: compute all features anew, and say how many integers agree.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Check every hash, the journal's chain and the restored model; exit 1 on any mismatch.

    Examples:
    [bold]fedup verify --run runs/mnist[/]
    [bold]fedup verify --relearn --run runs/head[/]
    """
    from fedup.cli._session import Session
    from fedup.run.verify import verify as check_folder

    session = Session(run)
    checks = check_folder(session.run, session.blank, session.probe, head=head)
    if relearn or fresh:
        from fedup.cli._exact import relearn_checks

        checks += relearn_checks(session, relearn=relearn, fresh=fresh)
    good = all(check.ok is not False for check in checks)
    result = {"ok": good, "checks": [vars(check) for check in checks]}
    options.show(result, as_json, lambda _: _print(checks, good))
    if not good:
        raise typer.Exit(1)


def _print(checks: list[Any], good: bool) -> None:
    console = wide_console()
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    marks = {True: "[green]ok[/]", False: "[bold red]MISMATCH[/]", None: "[yellow]note[/]"}
    for check in checks:
        short = _LONG_HASH.sub(r"\1…", check.found)  # whole with --json
        table.add_row(marks[check.ok], check.name, escape(short))
    console.print(table)
    some = any(check.found.startswith("not checked") for check in checks)
    sound = "The folder is sound as far as it could be checked." if some else "The folder is sound."
    console.print(sound if good else "[bold red]The folder does not check out.[/]")
