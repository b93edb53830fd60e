"""`fedup release`."""

from typing import Annotated

import typer

from fedup.cli import _options as options


def release(
    clients: Annotated[
        list[int] | None, typer.Argument(help="Clients whose nodes have new keys, or new numbers.")
    ] = None,
    run: options.RunOption = options.DEFAULT_RUN,
    everyone: Annotated[bool, typer.Option("--all", help="All clients, as after a restart of the SuperLink.")] = False,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Free the numbers of clients for other nodes: the next node that answers as such a client is bound to it.

    For the folder of a Flower server. Say so only of clients whose nodes you know.

    Examples:
    [bold]fedup release 2 --run runs/hospitals[/]
    [bold]fedup release --all --run runs/simulated[/]
    """
    from fedup.run.bindings import bindings_of, release
    from fedup.run.folder import Run

    if bool(clients) == everyone:
        raise typer.BadParameter("name the clients, as in `fedup release 2`, or pass --all.")
    with Run(run).writing("release", wait_s=wait) as writer:
        freed = sorted(set(clients or bindings_of(writer.state)))
        if freed:
            release(writer, freed)
    names = ", ".join(map(str, freed))
    text = f"Free for other nodes: client {names}." if freed else "No client is bound to a node; nothing was changed."
    options.show({"clients": freed}, as_json, lambda _: typer.echo(text))
