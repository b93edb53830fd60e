"""Journals that somebody changed by hand: in place, past the triggers, or written anew with a sound chain."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from fedup.run.journal import Journal

TRIGGERS = ("events_are_not_replaced", "events_are_not_changed", "events_are_not_removed")


def edit(path: Path, *statements: str | tuple) -> None:
    """Run SQL on the file; the triggers are there again afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    stored = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
    for name in TRIGGERS:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(*statement) if isinstance(statement, tuple) else connection.executescript(statement)
    for name in TRIGGERS:
        connection.execute(stored[name])
    connection.close()


def rewrite(run: Path, events: Iterable[tuple[str, dict]]) -> None:
    """A folder's journal of these events: a sound chain with other content."""
    (run / "run.sqlite").unlink()
    journal = Journal.create(run / "run.sqlite")
    for kind, body in events:
        journal.append(kind, body)
    journal.close()
