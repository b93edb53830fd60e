"""`fedup budget`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedup.cli._options import DEFAULT_RUN, DEFAULT_WAIT_S, JsonOption, RunOption, WaitOption


def budget(
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε that all releases of a client together may reach; without it: list."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The δ at which that ε is counted; 1e-5 if not given.")] = None,
    client: Annotated[list[int], typer.Option(help="Only for this client; may be repeated.")] = [],  # noqa: B006
    run: RunOption = DEFAULT_RUN,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
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
    from fedup.run.ledger import describe_ledger, set_budget

    if epsilon is None:
        if client or delta is not None:
            raise typer.BadParameter("--client and --delta belong to a limit: pass --epsilon as well.")
        _list(run, as_json)
        return
    delta = Budget.delta if delta is None else delta
    wanted = Budget(epsilon, delta)
    session = Session(run)
    with session.writing("budget", wait) as writer:
        set_budget(writer, wanted, client)
        told = describe_ledger(writer.state)
    if as_json:
        typer.echo(json.dumps({"epsilon": epsilon, "delta": delta, "clients": client, "ledger": told}, indent=2))
        return
    whose = f"client {', '.join(map(str, client))}" if client else "every client without a budget of its own"
    typer.echo(f"From now on ε = {epsilon:g} at δ = {delta:g} is the limit of {whose}.")
    for one in told:
        if one["budget"] is not None and one["epsilon"] > one["budget"]:
            typer.echo(f"Client {one['client']} has spent ε = {one['epsilon']:.4g} already: it will refuse everything.")


def _list(run: Path, as_json: bool) -> None:
    from fedup.run.folder import Run
    from fedup.run.ledger import default_budget, describe_charges, describe_ledger

    state = Run(run).read()
    everyone, ledger, charges = default_budget(state), describe_ledger(state), describe_charges(state)
    if as_json:
        limit = None if everyone is None else {"epsilon": everyone.epsilon, "delta": everyone.delta}
        typer.echo(json.dumps({"every_client": limit, "ledger": ledger, "charges": charges}, indent=2))
        return
    _print(everyone, ledger, charges)


def _print(everyone: Any, ledger: list[dict[str, Any]], charges: list[dict[str, Any]]) -> None:
    from fedup.cli._ledger import WHY_NOT_A_DIFFERENCE, charges_table, ledger_table
    from fedup.cli._progress import wide_console

    console = wide_console()
    limit = f"ε = {everyone.epsilon:g} at δ = {everyone.delta:g}" if everyone else "none (--epsilon sets one)"
    console.print(f"Limit of every client without a budget of its own: {limit}.", highlight=False)
    if not ledger:
        console.print("No client has released anything under differential privacy.", highlight=False)
        return
    console.print(ledger_table(ledger), highlight=False)
    console.print(WHY_NOT_A_DIFFERENCE, highlight=False)
    if charges:
        console.print(charges_table(charges), highlight=False)
