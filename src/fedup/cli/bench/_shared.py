"""Options that several verbs share, and what they do alike."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedup.cli._progress import progress_bars, wide_console
from fedup.errors import SettingError
from fedup.files import write_text

if TYPE_CHECKING:
    from fedup.bench.experiment import BenchCell

RESULTS = Path("benchmarks/results")
ExperimentArgument = Annotated[Path, typer.Argument(help="A TOML file, as in benchmarks/experiments.")]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, …")]
BudgetOption = Annotated[float | None, typer.Option(help="Stop cleanly before so many minutes are over.", min=0)]


def parse_seeds(text: str) -> list[int]:
    """Each seed once, in order."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise SettingError(f"Seeds are given as 0-2 or 0,1,5; found {text!r}.")
        seeds |= dict.fromkeys(range(first, last + 1))
    return list(seeds)


def check_data(cells: Sequence["BenchCell"]) -> None:
    """Whether all data sets are there: told before the first hour of work, not after it."""
    from fedup.tasks.datasets import check_there

    for name in sorted({cell.group.recipe.data for cell in cells}):
        check_there(name)


@contextmanager
def until_time_is_over(console: Console) -> Iterator[None]:
    """Work that may stop before its end, and then says so."""
    from fedup.bench.runner import BudgetSpentError

    try:
        yield
    except BudgetSpentError:
        console.print("The time given is over; the same command goes on from here.", highlight=False)


def measure_into(path: Path, measure: Callable[..., dict[str, Any]], *, as_json: bool = False) -> dict[str, Any]:
    """What is measured, written to a file; printed, too, as JSON if asked for."""
    if path.is_dir():
        raise typer.BadParameter(f"--out: {path} is a folder; name a file.")
    with progress_bars(wide_console(stderr=as_json)) as progress:
        result = measure(progress=progress)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    write_text(path, f"{text}\n")
    if as_json:
        typer.echo(text)
    return result
