"""The journal: what was appended stays, in order, and nothing else passes for it."""

import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import ArtifactError, StorageError
from fedup.run import journal as module
from fedup.run.journal import GENESIS, SCHEMA, Journal, is_unfinished

few = settings(max_examples=30, deadline=None, derandomize=True)
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
    Journal.create(path).close()
    told = []
    for kind, body in appended:
        journal = Journal(path, write=True)
        told.append(journal.append(kind, body))
        journal.close()
    assert events_at(path) == told
    assert [(event.kind, event.body) for event in told] == appended
    assert [event.seq for event in told] == list(range(1, len(appended) + 1))


def test_hashes_chain_from_genesis_over_everything_in_an_event(path):
    rows = sqlite3.connect(path).execute("SELECT * FROM events ORDER BY seq").fetchall()
    assert rows == rechained((at, kind, body) for _, at, kind, body, _, _ in rows)
    assert [event.hash for event in events_at(path)] == [row[-1] for row in rows]


def test_what_a_killed_process_had_appended_is_there(tmp_path):
    path = tmp_path / "run.sqlite"
    script = (
        "import sys; from pathlib import Path; from fedup.run.journal import Journal\n"
        "journal = Journal.create(Path(sys.argv[1]))\n"
        "for n in range(10**6):\n"
        "    journal.append('declined', {'n': n}); print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().splitlines()]
    numbers = [event.body["n"] for event in events_at(path)]
    assert numbers[: len(told)] == told
    assert len(numbers) <= len(told) + 1  # the one it was about to tell


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
        "UPDATE events SET seq = seq + 10",
        "DELETE FROM events WHERE seq = 5",
        "DELETE FROM events",
        "INSERT INTO events SELECT 1, at, kind, body, previous, hash FROM events WHERE seq = 1 "
        "ON CONFLICT (seq) DO UPDATE SET kind = 'x'",
    ],
)
def test_events_cannot_be_changed_or_removed_through_sql(path, statement):
    before = events_at(path)
    connection = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()
    assert events_at(path) == before


def test_an_edit_that_changes_nothing_is_accepted(path):
    """Proof that the refusals below are due to the edits."""
    before = events_at(path)
    edit(path, "UPDATE events SET at = at")
    assert events_at(path) == before


SWAP = "UPDATE events SET seq = -1 WHERE seq = 2; UPDATE events SET seq = 2 WHERE seq = 3; "
EDITS = {
    "a body edited": """UPDATE events SET body = replace(body, '"n": 2', '"n": 3') WHERE seq = 3""",
    "a body re-serialised": "UPDATE events SET body = json(body) WHERE seq = 3",
    "a body that is no JSON": "UPDATE events SET body = '{' WHERE seq = 5",
    "a date edited": "UPDATE events SET at = '2020-01-01T00:00:00.000+00:00' WHERE seq = 1",
    "a kind edited": "UPDATE events SET kind = 'evaluated' WHERE seq = 5",
    "a hash edited": f"UPDATE events SET hash = '{'1' * 64}' WHERE seq = 5",
    "a previous hash edited": f"UPDATE events SET previous = '{'1' * 64}' WHERE seq = 3",
    "the first removed": "DELETE FROM events WHERE seq = 1",
    "one removed from the middle": "DELETE FROM events WHERE seq = 3",
    "one removed and the others moved up": "DELETE FROM events WHERE seq = 3; UPDATE events SET seq = seq - 1 "
    "WHERE seq > 3; UPDATE sqlite_sequence SET seq = 4",
    "the last removed": "DELETE FROM events WHERE seq = 5",
    "all removed": "DELETE FROM events",
    "two reordered": f"{SWAP} UPDATE events SET seq = 3 WHERE seq = -1",
    "one inserted at the end": "INSERT INTO events SELECT 6, at, kind, body, hash, 'x' FROM events WHERE seq = 5",
    "one inserted before the first": "INSERT INTO events SELECT 0, at, kind, body, previous, 'x' FROM events "
    "WHERE seq = 1",
    "one inserted in the middle": "UPDATE events SET seq = -seq WHERE seq > 3; UPDATE events SET seq = 1 - seq "
    "WHERE seq < 0; INSERT INTO events SELECT 4, at, kind, body, hash, 'x' FROM events WHERE seq = 3",
    "one put in the place of another": "INSERT OR REPLACE INTO events "
    "SELECT 2, at, kind, '{}', previous, hash FROM events WHERE seq = 2",
    "a view changed": "DROP VIEW releases; CREATE VIEW releases AS SELECT 1",
    "a view removed": "DROP VIEW requests",
    "a trigger added": "CREATE TRIGGER more AFTER INSERT ON events BEGIN SELECT 1; END",
    "a table added": "CREATE TABLE more (a)",
    "an index added": "CREATE INDEX more ON events (kind)",
    "a column added": "ALTER TABLE events ADD COLUMN more TEXT",
}


@pytest.mark.parametrize("statements", EDITS.values(), ids=EDITS.keys())
def test_an_edited_journal_is_refused(path, statements):
    edit(path, statements)
    with pytest.raises(ArtifactError, match=r"run\.sqlite was edited.*good copy"):
        events_at(path)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("instead", ["", "CREATE TRIGGER {} BEFORE UPDATE ON events BEGIN SELECT 1; END"])
def test_a_trigger_that_was_removed_or_changed_is_refused(path, trigger, instead):
    connection = sqlite3.connect(path)
    connection.executescript(f"DROP TRIGGER {trigger}; {instead.format(trigger)}")
    connection.close()
    with pytest.raises(ArtifactError, match="triggers"):
        events_at(path)


def test_events_moved_to_other_places_are_refused_even_when_the_chain_is_made_anew_from_there(path):
    rows = sqlite3.connect(path).execute("SELECT at, kind, body FROM events ORDER BY seq").fetchall()
    chain = rechained([*rows[:1], *rows[3:]])
    edit(path, "DELETE FROM events", *(("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row) for row in chain))
    with pytest.raises(ArtifactError, match="it has 3 events, and 5 were written"):
        events_at(path)


def test_no_flipped_bit_leads_to_other_events(path, tmp_path):
    """It is refused one way or another, or was no part of any event."""
    before, whole = events_at(path), path.read_bytes()
    cells = whole.index(before[-1].at.encode())
    flipped = tmp_path / "flipped" / "run.sqlite"
    flipped.parent.mkdir()
    same = refused = 0
    for place in [*range(100), *range(100, len(whole), 53), *range(cells, min(cells + 400, len(whole)), 7)]:
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


@pytest.mark.parametrize("length", [2, 15, 99, 100, 511, 4095, 4096, 8192, -4096, -1])
def test_a_truncated_journal_is_refused(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ArtifactError, match=r"run\.sqlite"):
        events_at(path)
    assert not is_unfinished(path)


@pytest.mark.parametrize("content", [b"{}", b"PK\x03\x04" * 300, b"\0" * 8192, b"SQLite format 3\0"], ids=repr)
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "run.sqlite"
    path.write_bytes(content)
    for write in (False, True):
        with pytest.raises(ArtifactError, match=r"run\.sqlite is damaged or no SQLite file.*good copy"):
            Journal(path, write=write)
    assert not is_unfinished(path)
    assert path.read_bytes() == content


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
@pytest.mark.parametrize(
    ("version", "remedy"), [(7, "a newer"), (0, "an older"), (-1, "an older"), (-(2**31), "an older")]
)
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


def test_the_order_of_events_does_not_depend_on_the_clock(tmp_path, monkeypatch):
    times = [datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=400 * n) for n in range(5)]

    class Backwards:
        @staticmethod
        def now(zone):
            assert zone is UTC
            return times[len(appended)]

    monkeypatch.setattr(module, "datetime", Backwards)
    appended = []
    journal = Journal.create(tmp_path / "run.sqlite")
    for n in range(5):
        appended.append(journal.append("declined", {"n": n}))
    assert journal.events() == appended
    assert [event.body["n"] for event in journal.events()] == [0, 1, 2, 3, 4]
    assert [event.at for event in appended] == sorted((event.at for event in appended), reverse=True)
    journal.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x"], ids=repr)
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


def test_a_path_with_odd_characters_is_one_path(tmp_path):
    path = tmp_path / "ein Ordner?mode=ro#100%25 ρ日本" / "run.sqlite"
    path.parent.mkdir()
    journal = Journal.create(path)
    journal.append("created", {})
    journal.close()
    assert len(events_at(path)) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["run.sqlite"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.parent.name]


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


def test_only_a_journal_without_anything_is_unfinished(path, tmp_path):
    assert is_unfinished(tmp_path / "none.sqlite")
    (tmp_path / "empty.sqlite").touch()
    assert is_unfinished(tmp_path / "empty.sqlite")
    Journal.create(tmp_path / "empty.sqlite").close()
    assert not is_unfinished(tmp_path / "empty.sqlite")
    assert not is_unfinished(path)


def test_a_finished_journal_is_not_created_again(path):
    before = events_at(path)
    with pytest.raises(OSError, match="already exists"):
        Journal.create(path)
    assert events_at(path) == before


def test_a_reader_never_calls_a_sound_journal_edited_while_another_process_appends(path):
    program = (
        "import sys; from pathlib import Path; from fedup.run.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), write=True)\n"
        "for i in range(400): journal.append('declined', {'i': i})"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
    looks = 0
    while writer.poll() is None:
        assert len(events_at(path)) >= len(BODIES)
        looks += 1
    assert writer.returncode == 0
    assert looks > 1
    assert len(events_at(path)) == len(BODIES) + 400


def test_an_event_cannot_be_replaced_through_sql(path):
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(
            "INSERT OR REPLACE INTO events SELECT seq, at, kind, '{}', previous, hash FROM events LIMIT 1"
        )
    connection.close()


@pytest.mark.parametrize("name", ["sqliteXspy", "sqlitestuff", "other"])
def test_a_table_that_fedup_did_not_make_is_noticed(path, name):
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE {name} (a)")
    connection.close()
    with pytest.raises(ArtifactError, match="tables"):
        events_at(path)


def test_a_last_event_removed_together_with_the_count_is_noticed(path):
    edit(path, "DELETE FROM events WHERE seq = 5; DELETE FROM sqlite_sequence")
    with pytest.raises(ArtifactError, match="4 events, and 0 were written"):
        events_at(path)
