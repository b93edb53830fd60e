"""`fedup bench speed`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedup.cli._progress import progress_bars, wide_console
from fedup.cli.bench._shared import DeviceOption, JsonOption, check_file, echo_json, write_result


def speed(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/speed/this-machine.json"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part: training, growth, limits, extraction, clustering, serving; repeatable. Or precision, "
            "on demand only: it trains on real data for minutes."
        ),
    ] = None,
    device: DeviceOption = "auto",
    rows: Annotated[int, typer.Option(help="Feature rows to cluster.", min=1000)] = 50_000,
    width: Annotated[int, typer.Option(help="Features per row.", min=32)] = 512,
    literal: Annotated[
        bool, typer.Option("--literal", help="Also run the paper's recipe taken literally: a minute or two, on a CPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Training, growth with clients, feature reading, clustering, requests and serving, as ratios in one run.

    Example: [bold]fedup bench speed --out benchmarks/speed/my-machine.json[/]

    Example: [bold]fedup bench speed --only training --only growth --device cuda[/]
    """
    import torch

    from fedup.bench.speed import run_speed
    from fedup.bench.speed.table import HEAD, cells, is_shared, title
    from fedup.cli._session import checked_device

    check_file(out)
    on, parts = torch.device(checked_device(device)), only or ()
    console = wide_console(stderr=as_json)
    with progress_bars(console) as progress:
        result = run_speed(device=on, progress=progress, parts=parts, rows=rows, width=width, literal=literal)
    write_result(out, result)
    if as_json:
        echo_json(result)
        return
    table = Table(title=title(result), title_justify="left")
    for column in HEAD:
        table.add_column(column, justify="left" if column == HEAD[0] else "right")
    for row in result["table"]:
        *first, met = cells(row, shared=is_shared(result))
        table.add_row(*first, "[red]no" if met == "no" else met)
    console.print(table)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)
