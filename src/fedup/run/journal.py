"""The journal of a run folder: an append-only, hash-chained list of events in one SQLite file.

Everything a folder knows is in its events; requests and releases are views over them. Each event's hash covers the one
before it, so that an edited, removed or inserted row shows. The chain has no secret: whoever can rewrite the whole file
can make a new chain, which is why evidence pages print the hash of the last event for safekeeping elsewhere.
"""

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedup.errors import ArtifactError, StorageError

FORMAT_VERSION = 1
APPLICATION_ID = 0x46445550  # "FDUP", so that `file` and we can tell a journal from another database
GENESIS = "0" * 64
_BUSY_TIMEOUT_S = 10.0
_LONG = 2**15  # characters of a body, above which it is kept compressed
_HASHED_AT_ONCE = 2**20  # characters
# Errors of SQLite after which the file itself may be sound.
_TROUBLE_OUTSIDE = (
    *("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"),
    *("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_INTERRUPT", "SQLITE_CONSTRAINT", "SQLITE_TOOBIG"),
)
_GOOD_COPY = "Take a good copy of the folder."

SCHEMA = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE
) STRICT;
CREATE TRIGGER events_are_not_replaced BEFORE INSERT ON events
    WHEN EXISTS (SELECT 1 FROM events WHERE seq >= NEW.seq)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE VIEW requests AS
    SELECT asked.value ->> 'id' AS id, asked.value ->> 'reference' AS reference, asked.value ->> 'kind' AS kind,
           asked.value ->> 'digest' AS digest, events.at AS asked_at, events.seq AS asked_in,
           (SELECT max(later.seq) FROM events AS later, json_each(later.body, '$.requests') AS back
            WHERE later.kind = 'restored' AND back.value = asked.value ->> 'id') AS restored_in
    FROM events, json_each(events.body, '$.requests') AS asked
    WHERE events.kind = 'unlearned';
CREATE VIEW releases AS
    SELECT sent.value ->> 'client' AS client, sent.value ->> 'cells' AS cells, sent.value ->> 'bytes' AS bytes,
           sent.value ->> 'mechanism' AS mechanism, sent.value ->> 'sigma' AS sigma,
           events.at AS at, events.seq AS sent_in
    FROM events, json_each(events.body, '$.releases') AS sent;
"""


@dataclass(frozen=True)
class Event:
    """A change of the folder; `seq` orders events, the clock only dates them."""

    seq: int
    at: str
    kind: str
    body: Mapping[str, Any]
    hash: str


class PackedBody(Mapping[str, Any]):
    """The body of a long event, compressed: it is unpacked whenever it is looked at. A folder of very many clients has
    many of them, and few are looked at twice."""

    def __init__(self, text: str) -> None:
        self._packed = zlib.compress(text.encode(), 1)

    def _unpacked(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(zlib.decompress(self._packed))
        return body

    def __getitem__(self, name: str) -> Any:
        return self._unpacked()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._unpacked() == dict(other)

    __hash__ = None  # type: ignore[assignment]


def body_of(text: str) -> Mapping[str, Any]:
    """The body of an event, from its text."""
    parsed: Mapping[str, Any] = json.loads(text)
    return PackedBody(text) if len(text) > _LONG else parsed


class Journal:
    """The SQLite file, open for reading or for writing."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        self._connection = self._open(write)
        try:
            with self._explained():
                self._check_format()
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    def create(cls, path: Path) -> "Journal":
        """A journal without events; completes one whose creation was killed."""
        if not is_unfinished(path):
            raise StorageError(f"{path} already exists.")
        try:
            with closing(sqlite3.connect(path, isolation_level=None, timeout=_BUSY_TIMEOUT_S)) as connection:
                connection.executescript(
                    f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {FORMAT_VERSION}; {SCHEMA} COMMIT;"
                )
        except sqlite3.Error as error:
            raise _storage_error(path, error) from error
        with suppress(OSError):  # the folder around it is private already
            path.chmod(0o600)
        return cls(path, write=True)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def events(self) -> list[Event]:
        """All events, after a check of the whole chain."""
        with self._explained(), self._transaction("DEFERRED"):  # one transaction: another process may write between two
            if _schema_of(self._connection) != _expected_schema():
                raise self._edited("its tables, triggers or views are not those that fedup makes")
            columns = "seq, at, kind, body, previous, hash"
            last_given = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
            rows = self._connection.execute(f"SELECT {columns} FROM events ORDER BY seq")
            return self._checked(rows, last_given[0] if last_given else 0)

    @property
    def version(self) -> int:
        """A number that changes when somebody else commits to the file, and not with commits by this object."""
        with self._explained():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _checked(self, rows: Iterable[tuple[int, str, str, str, str, str]], last_given: int) -> list[Event]:
        """The events of these rows, each of which is checked, and packed, before the next one is read."""
        previous, events = GENESIS, list[Event]()
        for seq, at, kind, body, *hashes in rows:
            own = _hash(seq, at, kind, body, previous)
            if seq != len(events) + 1 or hashes != [previous, own]:
                raise self._edited(f"the chain of events breaks at event {seq} ({kind})")
            previous = own
            events.append(Event(seq, at, kind, body_of(body), own))
        if last_given != len(events):
            raise self._edited(f"it has {len(events)} events, and {last_given} were written")
        return events

    def _edited(self, how: str) -> ArtifactError:
        return ArtifactError(f"{self.path} was edited: {how}. {_GOOD_COPY}")

    def append(self, kind: str, body: Mapping[str, Any]) -> Event:
        """Write one event: on disk when this returns, not there when it raises."""
        with self._explained(), self._transaction("IMMEDIATE"):
            text = json.dumps(body, sort_keys=True, ensure_ascii=False, allow_nan=False)
            last = self._connection.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone()
            seq, previous = (last[0] + 1, last[1]) if last else (1, GENESIS)
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            own = _hash(seq, at, kind, text, previous)
            self._connection.execute(
                "INSERT INTO events (seq, at, kind, body, previous, hash) VALUES (?, ?, ?, ?, ?, ?)",
                (seq, at, kind, text, previous, own),
            )
            return Event(seq, at, kind, body_of(text), own)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Events that are appended inside are on disk together: all of them, or none."""
        try:
            with self._transaction("IMMEDIATE"):
                yield
        except sqlite3.Error as error:
            raise _storage_error(self.path, error) from error

    def _open(self, write: bool) -> sqlite3.Connection:
        # A reader may have to roll back what a killed writer left, so it opens for writing where it is allowed to.
        may_write = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        mode = "rw" if write or may_write else "ro"
        try:
            address = f"{_uri(self.path)}?mode={mode}"
            connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
            connection.execute("PRAGMA synchronous = EXTRA")  # a commit survives a power cut
            connection.execute("PRAGMA secure_delete = ON")
        except sqlite3.Error as error:
            raise _storage_error(self.path, error) from error
        return connection

    def _check_format(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            raise ArtifactError(f"{self.path} is no journal of a run folder: it was not made by fedup.")
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{self.path} has format {version}, and this fedup knows format {FORMAT_VERSION} only: use "
                f"{'a newer' if version > FORMAT_VERSION else 'an older'} fedup. Nothing was changed."
            )

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        if self._connection.in_transaction:  # a part of what is written together
            yield
            return
        self._connection.execute(f"BEGIN {kind}")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _storage_error(self.path, error) from error
        except (UnicodeDecodeError, TypeError) as error:  # bytes or a number in place of a text
            raise ArtifactError(f"{self.path} is damaged ({error}). {_GOOD_COPY}") from error


def is_unfinished(path: Path) -> bool:
    """Whether there is no journal yet, or an empty one whose creation was killed."""
    if not path.exists():
        return True
    try:
        with closing(sqlite3.connect(f"{_uri(path)}?mode=rw", uri=True, isolation_level=None)) as connection:
            return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    except sqlite3.Error:
        return False


def _uri(path: Path) -> str:
    return f"file:{quote(os.fsencode(path.absolute()))}"


def _hash(seq: int, at: str, kind: str, body: str, previous: str) -> str:
    """Of the JSON list of all of them; a long body is encoded part by part, which gives the same bytes."""
    digest = hashlib.sha256(json.dumps([previous, seq, at, kind])[:-1].encode() + b', "')
    for start in range(0, len(body), _HASHED_AT_ONCE):
        digest.update(json.dumps(body[start : start + _HASHED_AT_ONCE])[1:-1].encode())
    digest.update(b'"]')
    return digest.hexdigest()


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    named = "SELECT name, sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*' ORDER BY name"
    return connection.execute(named).fetchall()


def _expected_schema() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return _schema_of(connection)


def _storage_error(path: Path, error: sqlite3.Error) -> Exception:
    """SQLite's message, with what to do about it."""
    name = getattr(error, "sqlite_errorname", "")
    if not name.startswith(_TROUBLE_OUTSIDE):  # corrupt, no database, no such table, no text, ...
        return ArtifactError(f"{path} is damaged or no SQLite file ({error}). {_GOOD_COPY}")
    advice = "Check the disk and the permissions; what was there before is untouched."
    if name.startswith("SQLITE_FULL") or (name.startswith("SQLITE_CANTOPEN") and os.access(path.parent, os.W_OK)):
        advice = "Free some space and run the same command again; what was there before is untouched."
    elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        advice = (
            "The folder is read-only here: ask for write permission, or work on a copy. (What a killed process left "
            "half-written must be rolled back once by someone who may write.)"
        )
    elif name.startswith("SQLITE_BUSY"):
        advice = "Another program keeps the file locked: close it and run the same command again."
    return StorageError(f"Could not use {path}: {error}. {advice}")
