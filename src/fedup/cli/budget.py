"""`fedup budget`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedup.cli import _options as options


def budget(
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε that all releases of a client together may reach; without it: list."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The δ at which that ε is counted; 1e-5 if not given.")] = None,
    client: Annotated[list[int], typer.Option(help="Only for this client; may be repeated.")] = [],  # noqa: B006
    run: options.RunOption = options.DEFAULT_RUN,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Limit what clients release under differential privacy, or list limits and charges where none is given.

    A release that would pass the limit is refused before it is made. Without --client it holds for every client that
    has no budget of its own. What was spent stays spent.

    Example: [bold]fedup budget[/]

    Example: [bold]fedup budget --epsilon 8 --run runs/mnist[/]

    Example: [bold]fedup budget --epsilon 2 --client 3 --client 4[/]
    """
    from fedup.cli._session import Session
    from fedup.privacy.ledger import Budget
    from fedup.run.folder import Run
    from fedup.run.ledger import default_budget, describe_charges, describe_ledger, set_budget

    if epsilon is None:
        if client or delta is not None:
            raise typer.BadParameter("--client and --delta belong to a limit: pass --epsilon as well.")
        state = Run(run).read()
        everyone = default_budget(state)
        limits = {"every_client": None if everyone is None else asdict(everyone)}
        options.show({**limits, "ledger": describe_ledger(state), "charges": describe_charges(state)}, as_json, _print)
        return
    wanted = Budget(epsilon) if delta is None else Budget(epsilon, delta)
    with Session(run).writing("budget", wait) as writer:
        set_budget(writer, wanted, client)
        ledger = describe_ledger(writer.state)
    options.show({**asdict(wanted), "clients": client, "ledger": ledger}, as_json, _print_limit)


def _print_limit(result: dict[str, Any]) -> None:
    clients = ", ".join(map(str, result["clients"]))
    whose = f"client {clients}" if clients else "every client without a budget of its own"
    typer.echo(f"From now on ε = {result['epsilon']:g} at δ = {result['delta']:g} is the limit of {whose}.")
    for own in result["ledger"]:
        if own["budget"] is not None and own["epsilon"] > own["budget"]:
            typer.echo(f"Client {own['client']} has spent ε = {own['epsilon']:.4g} already: it will refuse everything.")


def _print(result: dict[str, Any]) -> None:
    from fedup.cli._ledger import charges_table, print_ledger
    from fedup.cli._progress import wide_console

    console, everyone = wide_console(), result["every_client"]
    limit = f"ε = {everyone['epsilon']:g} at δ = {everyone['delta']:g}" if everyone else "none (--epsilon sets one)"
    console.print(f"Limit of every client without a budget of its own: {limit}.")
    if not result["ledger"]:
        console.print("No client has released anything under differential privacy.")
        return
    print_ledger(console, result["ledger"])
    if result["charges"]:
        console.print(charges_table(result["charges"]))
