"""Progress on a terminal as bars, elsewhere as plain lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Show = Callable[[str, int, int], None]  # what, steps done, steps in all


def wide_console(*, stderr: bool = False) -> Console:
    """A console whose tables keep their columns when the output goes to a file or a pipe."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=100)


@contextmanager
def progress_bars(console: Console) -> Iterator[Show]:
    """A function `(what, done, total)` that shows how far each piece of work is."""
    if not console.is_terminal:
        yield lambda what, done, total: console.print(f"{what} …", highlight=False) if done == 0 else None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show
