"""`fedup bench scale`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedup.cli._progress import wide_console
from fedup.cli.bench._shared import measure_into


def scale(
    clients: Annotated[str, typer.Option(help="Numbers of clients, as 10,100,1000.")] = "10,100,1000",
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/scale/this-machine.json"),
) -> None:
    """Messages, bytes, memory and time of federations of many small clients, in Flower's simulation engine.

    A thousand clients take some minutes on two cores. Needs the extra `flower`.

    Example: [bold]fedup bench scale --clients 10,100[/]
    """
    from fedup.bench.scale import run_scale
    from fedup.bench.scale_table import HEAD, measured_rows

    try:
        sizes = sorted({int(size) for size in clients.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"--clients: {clients} is no list of numbers, as 10,100.") from error
    if not sizes or sizes[0] < 2:
        raise typer.BadParameter("--clients: a federation has 2 clients or more.")
    result, console = measure_into(out, partial(run_scale, sizes)), wide_console()
    (_, *names), (counts, *lines) = HEAD, zip(*measured_rows(result), strict=True)
    table = Table("", *counts, title="clients", title_justify="left")
    for name, line in zip(names, lines, strict=True):
        table.add_row(name, *line)
    console.print(table)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)
