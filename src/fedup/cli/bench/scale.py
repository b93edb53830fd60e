"""`fedup bench scale`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedup.cli._progress import wide_console
from fedup.cli.bench._shared import measure_into


def scale(
    replies: Annotated[str, typer.Option(help="Numbers of replies, as 1000,10000.")] = "1000,10000,100000",
    clients: Annotated[
        str | None, typer.Option(help="Simulate whole federations of so many clients instead, as 10,100,1000.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Result file; by default in benchmarks/server_work or benchmarks/scale.")
    ] = None,
) -> None:
    """What the server does for each client of a collection: time and memory for up to 100,000 made-up replies.

    They go through the real checks, ledger, store and journal, without nodes or an engine. Takes some minutes, and some
    20 GB in the folder for temporary files. With [bold]--clients[/] federations run in Flower's simulation engine
    instead: messages, bytes, memory and time. A thousand clients take some minutes on two cores.

    Needs the extra `flower`.

    Example: [bold]fedup bench scale --replies 1000,10000[/]
    """
    from fedup.bench import scale_table, server_work_table
    from fedup.bench.scale import run_scale
    from fedup.bench.server_work import run_server_work

    console = wide_console()
    if clients is None:
        out = out or Path("benchmarks/server_work/this-machine.json")
        result = measure_into(out, partial(run_server_work, _numbers("--replies", replies)))
        table = Table(*server_work_table.HEAD)
        for line in server_work_table.rows_of(result):
            table.add_row(*line)
    else:
        out = out or Path("benchmarks/scale/this-machine.json")
        result = measure_into(out, partial(run_scale, _numbers("--clients", clients)))
        (_, *names), (counts, *lines) = scale_table.HEAD, zip(*scale_table.measured_rows(result), strict=True)
        table = Table("", *counts, title="clients", title_justify="left")
        for name, values in zip(names, lines, strict=True):
            table.add_row(name, *values)
    console.print(table)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)


def _numbers(option: str, text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {text} is no list of numbers, as 10,100.") from error
    if sizes[0] < 2:
        raise typer.BadParameter(f"{option}: a federation has 2 clients or more.")
    return sizes
