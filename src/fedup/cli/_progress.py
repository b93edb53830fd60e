"""Progress on a terminal as bars, elsewhere as plain lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedup.cli._wording import visible

if TYPE_CHECKING:
    from fedup.bench.runner import CellEvent

Show = Callable[[str, int, int], None]  # the work, steps done, steps in all
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_SHOWN = {"r_a": "R-A", "f_a": "F-A", "asr": "ASR", "time": "seconds"}

_MOMENT_S, _FEW_STEPS = 0.5, 20


class _PlainConsole(Console):
    """A console on which names show as they are: no control character in them steers the terminal."""

    def render_str(self, text: str, **look: Any) -> Text:
        return super().render_str(visible(text), **look)


def wide_console(*, stderr: bool = False) -> Console:
    """A console whose tables keep their columns when the output goes to a file or a pipe."""
    console = _PlainConsole(stderr=stderr, highlight=False, emoji=False)
    return console if console.is_terminal else _PlainConsole(stderr=stderr, highlight=False, emoji=False, width=100)


@contextmanager
def progress_bars(console: Console, *, line_for_each: str | None = None) -> Iterator[Show]:
    """A function `(work, done, total)` that shows how far each piece of work is.

    Without a terminal: a line at the start and, where steps have a name (`round`), a line for each step; of many steps,
    those that follow within a moment are left out.
    """
    if not console.is_terminal:
        yield _lines(console, line_for_each)
        return
    with Progress(*_COLUMNS, TimeRemainingColumn(), console=console) as bars:
        task = cache(lambda what: bars.add_task(what, total=None))
        yield lambda what, done, total: bars.update(task(what), completed=done, total=total)


def _lines(console: Console, step: str | None) -> Show:
    started = time.perf_counter()
    printed_at = -_MOMENT_S

    def show(what: str, done: int, total: int) -> None:
        nonlocal printed_at
        time_s = time.perf_counter() - started
        line = f"{what}: {step} {done} of {total}, {time_s:.1f} s" if done else f"{what} …"
        due = done == total or total <= _FEW_STEPS or time_s - printed_at >= _MOMENT_S
        if done == 0 or (step is not None and due):
            console.print(line, markup=False, soft_wrap=True)
            printed_at = time_s

    return show


@contextmanager
def cell_progress(console: Console, total: int) -> Iterator[tuple[Show, Callable[["CellEvent"], None]]]:
    """For an experiment: what is going on now, and how many cells are over, with the time left for the others."""
    if not console.is_terminal:
        yield lambda *step: None, lambda event: console.print(_line(event), markup=False, soft_wrap=True)
        return
    with Progress(*_COLUMNS, console=console) as bars:
        cells = bars.add_task("cells", total=total)
        now = bars.add_task("", total=None, visible=False)

        def show(what: str, done: int, total: int) -> None:
            bars.update(now, description=what, completed=done, total=total, visible=bool(what))

        def note(event: "CellEvent") -> None:
            console.print(_line(event), markup=False, soft_wrap=True)
            bars.update(cells, completed=event.done, description=f"cells, about {_duration(event.left_s)} left")

        yield show, note


def _line(event: "CellEvent") -> str:
    """One finished cell in one line."""
    figures = event.result.get("metrics", {})
    text = ", ".join(f"{name} {figures[key]:.3f}" for key, name in _SHOWN.items() if figures.get(key) is not None)
    if event.outcome != "done":
        failure = event.result.get("failed", {})
        text = event.outcome + (f": {failure['error']}: {' '.join(failure['message'].split())}" if failure else "")
    return f"[{event.done}/{event.total}] {event.cell}: {text}; about {_duration(event.left_s)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
