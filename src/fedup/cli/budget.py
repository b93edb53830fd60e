"""`fedup budget`."""

import json
from typing import Annotated

import typer

from fedup.cli._options import DEFAULT_RUN, DEFAULT_WAIT_S, JsonOption, RunOption, WaitOption


def budget(
    epsilon: Annotated[float, typer.Option(help="ε that all releases of a client together may reach.")],
    delta: Annotated[float, typer.Option(help="The δ at which that ε is counted.")] = 1e-5,
    client: Annotated[list[int], typer.Option(help="Only for this client; may be repeated.")] = [],  # noqa: B006
    run: RunOption = DEFAULT_RUN,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Limit what clients release under differential privacy; a release that would pass it is refused before it is made.

    Without --client it holds for every client that has no budget of its own. What was spent stays spent.

    Example: [bold]fedup budget --epsilon 8 --run runs/mnist[/]

    Example: [bold]fedup budget --epsilon 2 --client 3 --client 4[/]
    """
    from fedup.cli._session import Session
    from fedup.privacy.ledger import Budget
    from fedup.run.ledger import describe_ledger, set_budget

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
