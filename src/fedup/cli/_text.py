"""Numbers, tables and answers in words, the same in every verb."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedup.cli._options import DEFAULT_RUN
from fedup.cli._wording import as_command_line
from fedup.run.in_words import STATES, ids

if TYPE_CHECKING:
    from fedup.run.answer import Outcome


def size(size_bytes: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"


def of(run: Path) -> str:
    """The option by which the next command names the folder; none for the default folder."""
    return "" if run == DEFAULT_RUN else f" --run {shlex.quote(str(run))}"


def seconds(time_s: Mapping[str, float]) -> str:
    """Times by stage and in all."""
    stages = ", ".join(f"{stage} {value:.2f}" for stage, value in time_s.items() if value >= 0.005)
    return f"{sum(time_s.values()):.2f} s ({stages})" if stages else f"{sum(time_s.values()):.2f} s"


def table(*columns: str, right: Collection[str] = (), **look: Any) -> Table:
    """A table without rows; columns named in `right` hold numbers."""
    empty = Table(title_justify="left", **look)
    for column in columns:
        empty.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return empty


def accuracy_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> Table:
    """Accuracies by name of a row and column; a dash where nothing was measured."""
    columns = [escape(column) for column in columns]
    shown = table(title, *columns, right=columns, box=None, pad_edge=False)
    for name, values in rows.items():
        shown.add_row(name, *("–" if value is None else f"{value:.3f}" for value in values))
    return shown


def figures_table(figures: Mapping[str, Any]) -> Table:
    """Accuracies before, with the filter, and restored."""
    measured = {
        "validation, retained": ("validation", "retain"),
        "held-out, retained": ("heldout", "retain"),
        "held-out, forgotten": ("heldout", "forget"),
        "training, forgotten": ("train", "forget"),
    }
    rows = {name: [figures[state][part][side] for part, side in measured.values()] for state, name in STATES.items()}
    return accuracy_table(figures.get("score", "accuracy"), list(measured), rows)


def describe(outcome: "Outcome") -> dict[str, Any]:
    """The outcome of an answer, as plain data."""
    report = outcome.report
    return {
        "declined": outcome.declined,
        "charged": any(release.name for release in report.releases),
        "filter": outcome.filter.id if outcome.filter else None,
        "clients_contacted": sorted(report.clients_contacted),
        "bytes_up": report.bytes_up,
        "time_s": report.time_s,
        "figures": outcome.figures,
    }


def print_declined(console: Console, result: dict[str, Any], *, done: str, fitted: str) -> None:
    """That nothing was `done`, why, and what to do."""
    reason = as_command_line(result["declined"].partition(" Nothing was changed.")[0])  # else for Python callers
    if not reason[0].isupper():
        reason = f"{fitted} was fitted, but {reason}."
    console.print(
        f"[bold red]Not {done}:[/] {escape(reason)}\nThe folder serves what it served "
        f"before. To have it {done} all the same, pass --force"
        + (" or raise --max-loss." if result["figures"] else ".")
        + (" What clients released for it is spent all the same (ε: fedup status)." if result["charged"] else "")
    )


def contact_in_words(result: dict[str, Any]) -> str:
    """Which clients were asked, and what they sent."""
    contacted, names = result["clients_contacted"], result.get("client_names", ())
    return (
        f"client {ids(contacted, names=names)} contacted, {size(result['bytes_up'])} sent"
        if contacted
        else "no client contacted"
    )


def print_orphaned_classes(console: Console, result: dict[str, Any]) -> None:
    """A note where no retained client holds a class that nobody asked to forget."""
    if result["classes_left_without_holder"]:
        console.print(
            "[yellow]Note:[/] no retained client holds class "
            f"{escape(ids(result['classes_left_without_holder'], names=result.get('class_names', ())))}, which "
            "nobody asked to forget: the filter will not let it pass, and no validation row shows it."
        )
