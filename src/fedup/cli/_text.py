"""Numbers and requests in words, the same in every verb."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedup.cli._options import DEFAULT_RUN
from fedup.cli._wording import as_command_line


def size(size_bytes: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"


def of(run: Path) -> str:
    """How the next command names the folder; the default one needs no name."""
    return "" if run == DEFAULT_RUN else f" --run {shlex.quote(str(run))}"


def seconds(time_s: Mapping[str, float]) -> str:
    """Times by stage and in all."""
    stages = ", ".join(f"{stage} {value:.2f}" for stage, value in time_s.items() if value >= 0.005)
    return f"{sum(time_s.values()):.2f} s ({stages})" if stages else f"{sum(time_s.values()):.2f} s"


def table(*columns: str, right: Collection[str] = (), **look: Any) -> Table:
    """A table without rows; columns named in `right` hold numbers."""
    made = Table(title_justify="left", **look)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def accuracy_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> Table:
    """Accuracies by name of a row and column; a dash where nothing was measured."""
    shown = table(title, *columns, right=columns, box=None, pad_edge=False)
    for name, values in rows.items():
        shown.add_row(name, *("–" if value is None else f"{value:.3f}" for value in values))
    return shown


def figures_table(figures: Mapping[str, Any]) -> Table:
    """Accuracies before, with the filter, and restored."""
    rows = {}
    for state, name in (("original", "before"), ("forgotten", "with the filter"), ("restored", "restored")):
        own = figures[state]
        heldout = own["heldout"]
        rows[name] = [own["validation"]["retain"], heldout["retain"], heldout["forget"], own["train"]["forget"]]
    columns = ["validation, retained", "held-out, retained", "held-out, forgotten", "training, forgotten"]
    return accuracy_table("accuracy", columns, rows)


def why(declined: str, fitted: str) -> str:
    """A refusal as a sentence of its own, without what the library's callers are told to do."""
    reason = as_command_line(declined.partition(" Nothing was changed.")[0])
    return reason if reason[0].isupper() else f"{fitted} was fitted, but {reason}."
