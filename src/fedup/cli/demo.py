"""`fedup demo`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedup.cli._progress import progress_bars, wide_console


def demo(
    data: Annotated[str, typer.Option(help="Data set: digits (built in), or mnist below FEDUP_DATA.")] = "digits",
    rounds: Annotated[int | None, typer.Option(help="Rounds of FedAvg; by default what the data set needs.")] = None,
    clients: Annotated[int, typer.Option(help="Clients in the federation.")] = 10,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")] = Path("runs/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Train a federation, let it forget a lying client, a class and a backdoor's samples, and remember them again.

    Example: [bold]fedup demo --data mnist --out runs/mnist[/]
    """
    from fedup.bench.demo import run_demo
    from fedup.bench.demo_exact import summary as exact_summary
    from fedup.bench.demo_report import write_demo_report

    console = wide_console(stderr=as_json)
    with progress_bars(console) as progress:
        result, drawings = run_demo(data=data, clients=clients, rounds=rounds, seed=seed, progress=progress)
    page = write_demo_report(result, drawings, out)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    console.print(_table(result))
    success = next(request["attack"]["success"] for request in result["requests"] if "attack" in request)
    console.print(
        f"Backdoor: {success['original']:.1%} of triggered test images were led astray, "
        f"{success['forgotten']:.1%} are now ({success['retrained']:.1%} after retraining).",
        highlight=False,
    )
    console.print(exact_summary(result["exact"]), highlight=False)
    console.print(
        "R-A: accuracy on held-out data that stays. F-A: on held-out data of what is forgotten (for samples: on the "
        "samples themselves).\nThe filter suppresses at the served interface; the frozen weights still hold what they "
        "learned.",
        style="dim",
    )
    console.print(f"Report: {page} and {page.with_suffix('.json')}", soft_wrap=True, highlight=False)


def _table(result: dict[str, Any]) -> Table:
    from fedup.bench.demo_report import STATES, summary_row

    title = f"{result['data']}, LeNet-5, {result['clients']} clients, {result['rounds']} rounds, seed {result['seed']}"
    table = Table("request", title=title, title_justify="left")
    for column in (*(f"{state}\nR-A / F-A" for state in STATES), "forget in", "retrain in"):
        table.add_column(column, justify="right", no_wrap=True)
    for request in result["requests"]:
        *figures, restored, forget_in, retrain_in, same = summary_row(request)
        table.add_row(*figures, f"{restored}\n{same.replace('DIFFERS', '[red]DIFFERS')}", forget_in, retrain_in)
    return table
