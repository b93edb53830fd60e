"""`fedup bench attack`."""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedup.cli._options import JsonOption
from fedup.cli._progress import wide_console
from fedup.cli.bench._shared import RESULTS, measure_into


def attack(
    data: Annotated[str, typer.Option(help="Data set: digits (built in), or mnist below FEDUP_DATA.")] = "mnist",
    model: Annotated[str | None, typer.Option(help="Model; by default the data set's own.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of FedAvg; by default what the data needs.", min=0)] = None,
    trials: Annotated[int, typer.Option(help="Trials of each attack; an audit takes ten times more.", min=20)] = 2000,
    seed: Annotated[int, typer.Option(help="Same seed, same federation, records and noise.")] = 0,
    flower: Annotated[bool, typer.Option("--flower", help="Hostile nodes of a Flower federation instead.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Attack exact mode: rows from heads before and after, and membership.")
    ] = False,
    backbone: Annotated[str, typer.Option(help="Backbone of --exact.")] = "random_conv",
    out: Annotated[Path | None, typer.Option(help="Result file; by default in benchmarks/results/attacks.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Attack what clients send: find a record among 100, tell members from others, audit the ε that is claimed, and all
    that a node's answers show besides.

    Each against centroids as they are, the paper's noise, and guarantees from ε = 8 to 0.5; with intervals and bounds.

    Example: [bold]fedup bench attack --data digits --trials 500 --out attacks.json[/]

    Example: [bold]fedup bench attack --data mnist --rounds 10[/]

    Example: [bold]fedup bench attack --exact --data digits --trials 200[/]

    With --flower nodes lie to the server: what does that do to the others' model?

    Example: [bold]fedup bench attack --flower --data digits[/]
    """
    if flower:
        _attack_flower(data, model, rounds, seed, out, as_json=as_json)
        return
    from fedup.bench.attacks.run import run_attacks

    path = out or RESULTS / "attacks" / f"{Path(data).stem}{'-exact' if exact else ''}.json"
    run = partial(run_attacks, data, model=model, rounds=rounds, trials=trials, seed=seed)
    if exact:
        from fedup.bench.attacks.exact import run_exact_attacks

        run = partial(run_exact_attacks, data, backbone, trials=trials, seed=seed)
    content = measure_into(path, run, as_json=as_json)
    if as_json:
        return
    console = wide_console()
    console.print(_table(content))
    console.print(
        "Bound: what the protection claims to allow; for the audit ε, and the figure is a lower bound on the true one.",
        style="dim",
    )
    console.print(f"Result: {path}. Next: fedup bench report", highlight=False, soft_wrap=True)


def _attack_flower(
    data: str, model: str | None, rounds: int | None, seed: int, out: Path | None, *, as_json: bool
) -> None:
    from fedup.bench.attacks.flower import run_hostile_nodes
    from fedup.bench.attacks.flower_table import ALARMS_HEAD, HEAD, REPEATS_HEAD, alarm_lines, lines, repeat_lines

    path = out or RESULTS / "attacks_flower" / f"{Path(data).stem}.json"
    content = measure_into(
        path, partial(run_hostile_nodes, data, model=model, rounds=rounds, seed=seed), as_json=as_json
    )
    if as_json:
        return
    console = wide_console()
    tables = ((HEAD, lines(content)), (REPEATS_HEAD, repeat_lines(content)), (ALARMS_HEAD, alarm_lines(content)))
    for head, rows in tables:
        shown = Table(*head)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(f"Result: {path}. Next: fedup bench report", highlight=False, soft_wrap=True)


def _table(content: dict[str, Any]) -> Table:
    from fedup.bench.attacks.run import cells, results_of, title

    shown = Table(title=title(content), title_justify="left")
    shown.add_column("attack, protection")
    shown.add_column("measure", no_wrap=True)
    for column in ("figure", "95 % interval", "chance", "bound"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, results in groupby(results_of(content), key=lambda result: result.name):
        shown.add_row(f"[bold]{name}")
        for result in results:
            _, protection, measure, figure, interval, chance, bound, kept, _ = cells(result)
            marked = f"[red]{bound}\npassed" if kept == "no" else bound
            shown.add_row(f"  {protection}", measure, figure, interval, chance, marked)
        shown.add_section()
    return shown
