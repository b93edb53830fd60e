"""`fedup bench withdrawals`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedup.cli._progress import wide_console
from fedup.cli.bench._shared import RESULTS, DeviceOption, measure_into


def withdrawals(
    only: Annotated[list[str] | None, typer.Option(help="Only digits, mnist or memorised; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same federations and withdrawals.")] = 0,
    folder: Annotated[Path, typer.Option(help="Folder for result files, NAME-seedSEED.json.")] = RESULTS
    / "withdrawals",
    device: DeviceOption = "auto",
) -> None:
    """Answer thirty ordinary withdrawals by the default call, and compare each verdict with Retrain's.

    Settings were chosen on seed 100; seed 0 is the one reported.

    Example: [bold]fedup bench withdrawals --only digits[/]

    Example: [bold]fedup bench withdrawals --device cuda[/]
    """
    from fedup.bench.withdrawals import SETTINGS, run_withdrawals
    from fedup.bench.withdrawals_table import case_row, goals
    from fedup.cli._session import checked_device

    names = list(dict.fromkeys(only or SETTINGS))
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise typer.BadParameter(f"--only: {unknown[0]} is none of {', '.join(SETTINGS)}.")
    console, cases = wide_console(), []
    for name in names:
        run = partial(run_withdrawals, SETTINGS[name], seed=seed, device=checked_device(device))
        result = measure_into(folder / f"{name}-seed{seed}.json", run)
        cases += [(name, case) for case in result["cases"]]
    shown = Table("withdrawn", "verdict", "by Retrain", "worst class", "filter", title="Withdrawals")
    for name, case in cases:
        row = case_row(name, case)
        shown.add_row(f"{row[0]}, {row[1]}", row[6], row[8], row[10], row[11])
    console.print(shown)
    judged = Table("goal", "found", "met")
    for goal in goals([case for _, case in cases]):
        judged.add_row(goal.text, goal.found, "[red]no" if goal.met == "no" else goal.met)
    console.print(judged)
    console.print(f"Results: {folder}. Next: fedup bench report", highlight=False, soft_wrap=True)
