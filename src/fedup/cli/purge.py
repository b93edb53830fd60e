"""`fedup purge`."""

import sys
from typing import Annotated

import typer

from fedup.cli import _options as options
from fedup.run.in_words import count


def purge(
    run: options.RunOption = options.DEFAULT_RUN,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Destroy the centroids that requests in force have sealed, for good.

    Restoring one of several requests then asks clients. Restoring the last one always works.
    Backups of the folder are yours to purge.

    Example: [bold]fedup purge --run runs/mnist --yes[/]
    """
    from fedup.cli._session import Session
    from fedup.run.answer import RequestDesk
    from fedup.unlearning.unlearn import sealed_cells

    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("nobody is there to be asked: pass --yes to destroy the sealed statistics for good.")
    if not yes and not typer.confirm(f"Destroy the sealed statistics in {run} for good?"):
        typer.echo("Nothing was changed.")
        return
    session, claim, has_changes = Session(run), None, False
    with session.writing("purge", wait) as writer:
        cells: list[tuple[int, int]] = []
        if writer.state.is_exact and writer.state.active:  # cached features go, too
            from fedup.cli._exact import purge_exactly

            cells, claim = purge_exactly(session, writer.state, writer)
        elif not writer.state.is_exact:
            store = session.store(writer.state, writer)
            cells = sealed_cells(store, writer.state.forgets)
            if cells or writer.state.active:
                plugged = session.plugged(writer.state)
                delta = plugged.served.delta if plugged.served else None
                has_changes = delta is not None and not delta.is_merged
                if cells or has_changes:
                    RequestDesk(writer, plugged, store).purge()
    text = "Nothing is sealed; nothing was changed."
    if cells:
        whose = f"{count(len(cells), 'cell')} of {count(len({client for client, _ in cells}), 'client')}"
        text = f"Destroyed the sealed statistics of {whose}; they are in no file of {run}."
    elif has_changes:
        text = "No statistics are sealed. The delta's changes of single clients are in no file of the folder any more."
    elif claim is not None:
        text = "No statistics are sealed; cached features of forgotten rows are in no file of the folder."
    if claim is not None:
        text += f"\nClaim: {claim['kind']}. {claim['sentence']}"
    result = {"cells": [list(cell) for cell in cells], **({"claim": claim} if claim else {})}
    options.show(result, as_json, lambda _: typer.echo(text))
