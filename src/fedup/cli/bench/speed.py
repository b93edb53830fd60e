"""`fedup bench speed`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._options import JsonOption
from fedup.cli._progress import wide_console
from fedup.cli._text import table
from fedup.cli.bench._shared import DeviceOption, measure_into


def speed(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/speed/this-machine.json"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part: training, growth, limits, extraction, clustering, closed_form, serving; repeatable. "
            "Or precision, on demand only: it trains on real data for minutes."
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
    """Training, growth with clients, feature reading, clustering, moments, requests and serving, in one run.

    Example: [bold]fedup bench speed --out benchmarks/speed/my-machine.json[/]

    Example: [bold]fedup bench speed --only training --only growth --device cuda[/]
    """
    import torch

    from fedup.bench.speed import run_speed
    from fedup.bench.speed.table import HEAD, cells, is_shared, title
    from fedup.cli._session import checked_device

    on, parts = torch.device(checked_device(device)), only or ()
    run = partial(run_speed, device=on, parts=parts, rows=rows, width=width, literal=literal)
    result = measure_into(out, run, as_json=as_json)
    if as_json:
        return
    console, shown = wide_console(), table(*HEAD, right=HEAD[1:], title=title(result))
    for row in result["table"]:
        *first, met = cells(row, shared=is_shared(result))
        shown.add_row(*first, "[red]no" if met == "no" else met)
    console.print(shown)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)
