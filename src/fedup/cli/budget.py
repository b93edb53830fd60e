"""`fedup budget`."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from fedup.cli import _options as options
from fedup.cli._names import Names
from fedup.cli._progress import wide_console
from fedup.cli._text import table
from fedup.privacy.ledger import Budget
from fedup.run.folder import Run
from fedup.run.in_words import moment
from fedup.run.ledger import describe_charges, describe_ledger, ledger_of, set_budget

_WHY_NOT_A_DIFFERENCE = (
    "ε left is that of the largest single release still allowed. It is not ε allowed − ε spent: releases add up as "
    "squares of μ (Gaussian DP), and each ε is read off such a sum."
)


def budget(
    epsilon: Annotated[
        float | None, typer.Option(help="ε that a client's releases may reach; if left out, list.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The δ at which that ε is counted; 1e-5 if not given.")] = None,
    client: Annotated[list[str], typer.Option(help="Only for this client, by name or number; repeatable.")] = [],  # noqa: B006
    run: options.RunOption = options.DEFAULT_RUN,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Limit what clients release under differential privacy, or list limits and charges.

    A release beyond the limit is refused before it is made. What was spent stays spent.
    Without --client the limit holds for every client that has no budget of its own.

    Examples:
    [bold]fedup budget[/]
    [bold]fedup budget --epsilon 8 --run runs/mnist[/]
    [bold]fedup budget --epsilon 2 --client 3 --client 4[/]
    """
    from fedup.cli._session import Session

    if epsilon is None:
        if client or delta is not None:
            raise typer.BadParameter("--client and --delta belong to a limit: pass --epsilon as well.")
        state = Run(run).read()
        everyone = ledger_of(state).budgets.get(None)
        limits = {"every_client": None if everyone is None else asdict(everyone)}
        options.show({**limits, "ledger": describe_ledger(state), "charges": describe_charges(state)}, as_json, _print)
        return
    wanted = Budget(epsilon) if delta is None else Budget(epsilon, delta)
    with Session(run).writing("budget", wait) as writer:
        clients = [Names.of(writer.state.about).client(own) for own in client]
        set_budget(writer, wanted, clients)
        ledger = describe_ledger(writer.state)
    options.show({**asdict(wanted), "clients": clients, "ledger": ledger}, as_json, _print_limit)


def _print_limit(result: dict[str, Any]) -> None:
    clients = ", ".join(map(str, result["clients"]))
    whose = f"client {clients}" if clients else "every client without a budget of its own"
    typer.echo(f"From now on ε = {result['epsilon']:g} at δ = {result['delta']:g} is the limit of {whose}.")
    for own in result["ledger"]:
        if own["budget"] is not None and own["epsilon"] > own["budget"]:
            typer.echo(f"Client {own['client']} has spent ε = {own['epsilon']:.4g} already: it will refuse everything.")


def _print(result: dict[str, Any]) -> None:
    console, everyone = wide_console(), result["every_client"]
    limit = f"ε = {everyone['epsilon']:g} at δ = {everyone['delta']:g}" if everyone else "none (--epsilon sets one)"
    console.print(f"Limit of every client without a budget of its own: {limit}.")
    if not result["ledger"]:
        console.print("No client has released anything under differential privacy.")
        return
    print_ledger(console, result["ledger"])
    shown = table("when", "client", "for", "protection", "μ", right=("client", "μ"), title="Charges")
    for charge in result["charges"]:
        row = (moment(charge["at"]), str(charge["client"]), charge["what"], charge["mechanism"], f"{charge['mu']:.3g}")
        shown.add_row(*row)
    if result["charges"]:
        console.print(shown)


def print_ledger(console: Console, ledger: list[dict[str, Any]]) -> None:
    """By client: releases, and ε spent, allowed and left."""
    columns = ("client", "releases", "ε spent", "ε allowed", "ε left", "at δ")
    shown = table(*columns, right=columns, title="Privacy spent by client")
    for own in ledger:
        spent = f"{own['epsilon']:.3g}" + (" TEST MODE: no privacy" if own["test_mode"] else "")
        if own["unprotected"]:
            spent = f"∞: {own['unprotected']} without guarantee; the others {spent}"
        limits = ["no limit", ""] if own["budget"] is None else [f"{own['budget']:g}", f"{own['left']:.3g}"]
        releases = str(own["releases"]) + (f" (+{own['corrections']} by its own account)" if own["corrections"] else "")
        shown.add_row(str(own["client"]), releases, spent, *limits, f"{own['delta']:g}")
    console.print(shown)
    console.print(_WHY_NOT_A_DIFFERENCE)
