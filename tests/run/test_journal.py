"""The journal: what was appended stays, in order, and nothing else passes for it."""

import hashlib
import json
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedup.errors import ArtifactError, StorageError
from fedup.run.journal import GENESIS, SCHEMA, Journal, is_unfinished

few = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TRIGGERS = ("events_are_not_replaced", "events_are_not_changed", "events_are_not_removed")
BODIES = [{"about": {"n": n, "name": "Zoë ρ"}} for n in range(5)]
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
)
bodies = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=5), values | st.lists(values, max_size=3), max_size=4
)


@pytest.fixture
def path(tmp_path):
    """A journal of five events."""
    journal = Journal.create(tmp_path / "run.sqlite")
    for body in BODIES:
        journal.append("created", body)
    journal.close()
    return tmp_path / "run.sqlite"


def events_at(path):
    journal = Journal(path)
    try:
        return journal.events()
    finally:
        journal.close()


def edit(path, *statements):
    """Run SQL on the file by hand, past the triggers: they are there again afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    stored = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
    for name in TRIGGERS:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(*statement) if isinstance(statement, tuple) else connection.executescript(statement)
    for name in TRIGGERS:
        connection.execute(stored[name])
    connection.close()


def rechained(rows):
    """Rows (at, kind, body) as a chain of events with right hashes, made without the code under test."""
    previous, chain = GENESIS, []
    for seq, (at, kind, body) in enumerate(rows, start=1):
        own = hashlib.sha256(json.dumps([previous, seq, at, kind, body]).encode()).hexdigest()
        chain.append((seq, at, kind, body, previous, own))
        previous = own
    return chain


@few
@given(st.lists(st.tuples(st.sampled_from(["created", "trained", "ü"]), bodies), max_size=5))
def test_events_are_there_after_reopening_as_they_were_appended(tmp_path_factory, appended):
    path = tmp_path_factory.mktemp("journal") / "run.sqlite"
    assert is_unfinished(path)
    path.touch()
    assert is_unfinished(path)
    Journal.create(path).close()
    assert not is_unfinished(path)
    with pytest.raises(OSError, match="already exists"):
        Journal.create(path)
    told = []
    for kind, body in appended:
        journal = Journal(path, write=True)
        told.append(journal.append(kind, body))
        journal.close()
    assert events_at(path) == told
    assert [(event.kind, event.body) for event in told] == appended
    assert [event.seq for event in told] == list(range(1, len(appended) + 1))
    rows = sqlite3.connect(path).execute("SELECT * FROM events ORDER BY seq").fetchall()
    assert rows == rechained((at, kind, body) for _, at, kind, body, _, _ in rows)
    assert [event.hash for event in told] == [row[-1] for row in rows]


def test_a_transaction_that_was_killed_is_rolled_back_by_a_reader(path):
    before = events_at(path)
    script = (
        "import os, signal, sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA cache_size = 1'); connection.execute('BEGIN IMMEDIATE')\n"
        "for n in range(6, 200):\n"
        "    row = (n, 'at', 'kind', 'body' * 100, 'previous', str(n))\n"
        "    connection.execute('INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)', row)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert path.with_name("run.sqlite-journal").exists()  # it had begun to write to the file itself
    assert events_at(path) == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET at = '2020-01-01' WHERE seq = 2",
        "DELETE FROM events WHERE seq = 5",
        "INSERT INTO events SELECT 1, at, kind, body, previous, hash FROM events WHERE seq = 1 "
        "ON CONFLICT (seq) DO UPDATE SET kind = 'x'",
        "INSERT OR REPLACE INTO events SELECT seq, at, kind, '{}', previous, hash FROM events LIMIT 1",
    ],
)
def test_events_cannot_be_changed_replaced_or_removed_through_sql(path, statement):
    before = events_at(path)
    connection = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()
    assert events_at(path) == before


def refuses(path):
    with pytest.raises(ArtifactError, match=r"run\.sqlite was edited.*good copy"):
        events_at(path)
    return True


@few
@given(
    st.sampled_from(["at", "kind", "body", "previous", "hash"]),
    st.integers(1, 5),
    st.sampled_from(["", "{", "x", None]),
)
@example("at", 1, None)
@example("body", 3, None)
def test_an_event_of_which_anything_was_edited_is_refused(path, column, seq, value):
    """None leaves it as it is: proof that the refusals are due to the edits."""
    whole, before = path.read_bytes(), events_at(path)
    edit(path, (f"UPDATE events SET {column} = coalesce(?, {column}) WHERE seq = ?", (value, seq)))
    assert events_at(path) == before if value is None else refuses(path)
    path.write_bytes(whole)


@few
@given(st.permutations(range(1, 6)), st.integers(0, 5), st.booleans())
@example([1, 2, 3, 4, 5], 4, True)  # the last one cut off, with the count
def test_events_removed_or_reordered_are_refused_even_when_the_chain_and_the_count_are_made_anew(
    path, order, kept, anew
):
    whole, before = path.read_bytes(), events_at(path)
    rows = {row[0]: row for row in sqlite3.connect(path).execute("SELECT * FROM events")}
    moved = [(place, *rows[seq][1:]) for place, seq in enumerate(order[:kept], start=1)]
    rechain = rechained(row[1:4] for row in moved) if anew else moved
    edit(path, "DELETE FROM events", *(("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row) for row in rechain))
    if not anew or kept < 5:  # a whole new chain over all places is found by the head kept elsewhere
        assert events_at(path) == before if moved == list(rows.values()) else refuses(path)
    path.write_bytes(whole)


EDITS = {
    "a body re-serialised": "UPDATE events SET body = json(body) WHERE seq = 3",
    "one removed and the others moved up": "DELETE FROM events WHERE seq = 3; UPDATE events SET seq = seq - 1 "
    "WHERE seq > 3; UPDATE sqlite_sequence SET seq = 4",
    "the last removed with the count": "DELETE FROM events WHERE seq = 5; DELETE FROM sqlite_sequence",
    "the count raised": "UPDATE sqlite_sequence SET seq = 60",
    "one inserted at the end": "INSERT INTO events SELECT 6, at, kind, body, hash, 'x' FROM events WHERE seq = 5",
    "one inserted before the first": "INSERT INTO events SELECT 0, at, kind, body, previous, 'x' FROM events "
    "WHERE seq = 1",
    "a view changed": "DROP VIEW releases; CREATE VIEW releases AS SELECT 1",
    "a view removed": "DROP VIEW requests",
    "a trigger added": "CREATE TRIGGER more AFTER INSERT ON events BEGIN SELECT 1; END",
    "a table added": "CREATE TABLE sqliteXspy (a)",
    "an index added": "CREATE INDEX more ON events (kind)",
    "a column added": "ALTER TABLE events ADD COLUMN more TEXT",
}


@pytest.mark.parametrize("statements", EDITS.values(), ids=EDITS.keys())
def test_an_edited_journal_is_refused(path, statements):
    edit(path, statements)
    refuses(path)


@pytest.mark.parametrize("instead", ["", "CREATE TRIGGER {} BEFORE UPDATE ON events BEGIN SELECT 1; END"])
def test_a_trigger_that_was_removed_or_changed_is_refused(path, instead):
    whole = path.read_bytes()
    for trigger in TRIGGERS:
        connection = sqlite3.connect(path)
        connection.executescript(f"DROP TRIGGER {trigger}; {instead.format(trigger)}")
        connection.close()
        with pytest.raises(ArtifactError, match="triggers"):
            events_at(path)
        path.write_bytes(whole)


def test_no_flipped_bit_leads_to_other_events(path, tmp_path):
    """It is refused one way or another, or was no part of any event."""
    before, whole = events_at(path), path.read_bytes()
    cells = whole.index(before[-1].at.encode())
    flipped = tmp_path / "flipped" / "run.sqlite"
    flipped.parent.mkdir()
    same = refused = 0
    for place in [*range(0, 100, 3), *range(100, len(whole), 211), *range(cells, min(cells + 400, len(whole)), 7)]:
        if 60 <= place < 64:  # the format's version, which has its own tests
            continue
        content = bytearray(whole)
        content[place] ^= 1 << place % 7
        flipped.write_bytes(content)
        try:
            found = events_at(flipped)
        except (ArtifactError, StorageError):
            refused += 1
        else:
            assert found == before
            same += 1
        for rest in flipped.parent.iterdir():
            rest.unlink()
    assert same > 0
    assert refused > 20


@few
@given(st.integers(1, 24_000) | st.binary(min_size=2, max_size=40))
@example(4096)
@example(b"SQLite format 3\0")
@example(b"\0" * 8192)
def test_a_truncated_journal_or_a_file_that_is_none_is_refused_and_left_as_it_is(path, content):
    whole = path.read_bytes()
    data = whole[: max(2, content % len(whole))] if isinstance(content, int) else content  # of one: none, for SQLite
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"run\.sqlite.*[Tt]ake a good copy|not made by fedup"):
        events_at(path)
    assert not is_unfinished(path)
    assert path.read_bytes() == data
    path.write_bytes(whole)


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "run.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(f"{SCHEMA} PRAGMA user_version = 1;")
    connection.close()
    content = path.read_bytes()
    for write in (False, True):
        with pytest.raises(ArtifactError, match="not made by fedup"):
            Journal(path, write=write)
    assert not is_unfinished(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(("version", "remedy"), [(2, "a newer"), (0, "an older"), (-(2**31), "an older")])
def test_another_format_is_refused_and_nothing_changes(path, write, version, remedy):
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(
        ArtifactError, match=f"format {version}, and this fedup knows format 1 only: use {remedy} fedup"
    ):
        Journal(path, write=write)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), b"x"], ids=repr)
def test_a_body_that_is_no_json_is_refused_and_leaves_nothing(path, value):
    before = events_at(path)
    journal = Journal(path, write=True)
    with pytest.raises((ValueError, TypeError)):
        journal.append("evaluated", {"deep": [{"x": value}]})
    assert journal.events() == before
    assert journal.append("evaluated", {}).seq == len(before) + 1
    journal.close()


def test_an_append_that_cannot_be_written_leaves_nothing(path):
    before = events_at(path)
    journal = Journal(path, write=True)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TRIGGER full AFTER INSERT ON events BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(OSError, match=r"Could not use .*run\.sqlite: no room"):
        journal.append("evaluated", {})
    other.execute("DROP TRIGGER full")
    other.close()
    assert journal.events() == before
    journal.close()


def test_the_views_say_what_the_events_say(tmp_path):
    def asked(number, reference, kind):
        return {"id": f"R{number}", "reference": reference, "kind": kind, "digest": f"d{number}", "forget": {}}

    releases = [{"client": 3, "cells": 2, "bytes": 900, "mechanism": "none", "sigma": 0.5}]
    journal = Journal.create(tmp_path / "run.sqlite")
    made = [
        journal.append("created", {"about": {}}),
        journal.append("unlearned", {"requests": [asked(1, "Zoë's", "client"), asked(2, None, "class")]}),
        journal.append("declined", {"requests": [], "declined": [asked(3, None, "class")], "releases": releases}),
        journal.append("restored", {"requests": ["R1"], "releases": []}),
        journal.append("unlearned", {"requests": [asked(3, None, "sample")], "releases": releases * 2}),
    ]
    journal.close()
    connection = sqlite3.connect(tmp_path / "run.sqlite")
    requests = connection.execute("SELECT * FROM requests ORDER BY id").fetchall()
    assert requests == [
        ("R1", "Zoë's", "client", "d1", made[1].at, 2, 4),
        ("R2", None, "class", "d2", made[1].at, 2, None),
        ("R3", None, "sample", "d3", made[4].at, 5, None),
    ]
    sent = connection.execute("SELECT * FROM releases ORDER BY sent_in").fetchall()
    assert sent == [(3, 2, 900, "none", 0.5, made[n].at, n + 1) for n in (2, 4, 4)]
    connection.close()


def test_a_reader_never_calls_a_sound_journal_edited_while_another_process_appends(path):
    program = (
        "import sys; from pathlib import Path; from fedup.run.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), write=True)\n"
        "for i in range(100): journal.append('declined', {'i': i})"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    looks = 0
    while writer.poll() is None:
        assert len(events_at(path)) >= len(BODIES)
        looks += 1
    assert writer.returncode == 0
    assert looks > 1
    assert len(events_at(path)) == len(BODIES) + 100
