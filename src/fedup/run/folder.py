"""The run folder: one federation's model, centroids, filters and requests, through crashes and for months.

- `run.sqlite`: the journal; its commit is the only commit point
- `files/`: model, centroids and filter, named by their content
- `code/`: the user's own files that make data set and model, as they were at training
- `lock`: held by the one writer
- `training/`, `retrain.lock`: rounds of a training that goes on beside the served base, and who trains
- `subjects.key`: the key of persons, where the data name them and no other file was given
- `evidence/`: pages written by `fedup evidence`
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedup.errors import ArtifactError, MissingRunError, SettingError
from fedup.files import explained, replacing
from fedup.run.journal import Event, Journal, is_unfinished
from fedup.run.lock import held, holder
from fedup.run.state import FileRecord, State, after, changed_by, state_of
from fedup.run.store import FileStore, hash_of
from fedup.run.training_files import sweep_training

_OURS = ("run.sqlite", "run.sqlite-journal", "files", "lock", "code")  # what a killed creation may leave
_PRIVATE = 0o700  # centroids are private data


class Run:
    """A run folder at a path; nothing is opened before it is needed, so a folder can move between calls."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = FileStore(self.path / "files")
        self.journal_path, self.lock_path, self.code_path = (
            self.path / name for name in ("run.sqlite", "lock", "code")
        )

    @property
    def holder(self) -> str | None:
        """The process that writes now, in words; None when there is none."""
        return holder(self.lock_path)

    def read(self) -> State:
        """The state after the last event, with the chain checked. Never waits for a writer."""
        self._check_exists()
        with closing(Journal(self.journal_path)) as journal:
            events = journal.events()
        if not events:  # killed while it was made
            raise self._missing()
        return state_of(events)

    @contextmanager
    def writing(
        self,
        command: str,
        *,
        wait_s: float = 0.0,
        on_wait: Callable[[str], None] = lambda holder: None,
        known: "KnownJournal | None" = None,
    ) -> Iterator["Writer"]:
        """The folder with this process as its only writer. With what is `known` of the journal, it is read again only
        if somebody else changed it."""
        self._check_exists()
        with held(self.lock_path, command, wait_s=wait_s, on_wait=on_wait):
            if known is not None:
                with known.opened(self.journal_path) as journal:
                    writer = Writer(self, journal, known.state(journal))
                    writer.sweep()
                    yield writer
                    known.note(writer.state)
                return
            with closing(Journal(self.journal_path, write=True)) as journal:
                writer = Writer(self, journal, state_of(journal.events()))
                writer.sweep()
                yield writer

    def code(self, record: Mapping[str, str]) -> Path:
        """The path of a copied Python file, after a check of its hash."""
        path = self.code_path / record["name"]
        found = hash_of(path)[0] if path.is_file() else "missing"
        if found != record["sha256"]:
            raise ArtifactError(
                f"{path} is not the file that was kept at training: it is {found[:12]}, and {record['sha256'][:12]} "
                "was stored. Take a good copy of it."
            )
        return path

    def keep_code(self, source: Path) -> dict[str, str]:
        """Copy a Python file of the user into the folder; it counts once an event names its record."""
        record, content = _read_code(source)
        with replacing(self.code_path / record["name"]) as partial:
            partial.write_bytes(content)
        return record

    def start(
        self,
        about: Mapping[str, Any],
        *,
        code: Mapping[str, Path] | None = None,
        restart: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        """Make the folder for what `about` describes; a folder that exists must have the same `about`.

        The user's Python files in `code` are copied into it and noted in `about`, by name and hash. `about` may change
        while no round of training is done, or with `restart` while training is not finished.
        """
        copies = {name: _read_code(source) for name, source in (code or {}).items()}
        about = {**about, "code": {name: record for name, (record, _) in copies.items()}} if copies else about
        self._check_free()
        if not restart and self._is_made_for(about):  # to open a folder takes no lock
            return
        with explained(f"make the folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            self.files.folder.mkdir(exist_ok=True, mode=_PRIVATE)
        with held(self.lock_path, "train", wait_s=wait_s):
            if is_unfinished(self.journal_path):
                self._check_nothing_lost()
                Journal.create(self.journal_path).close()
            with closing(Journal(self.journal_path, write=True)) as journal:
                state = state_of(journal.events())
                if restart and state.trained is None:
                    self.files.checkpoint.unlink(missing_ok=True)
                if state.trained is not None or self.files.checkpoint.exists():
                    self._check_about(state, about)
                elif not state.events or _differences(state, about):
                    for record, content in copies.values():
                        with replacing(self.code_path / record["name"]) as partial:
                            partial.write_bytes(content)
                    journal.append("created", {"about": about})

    def _is_made_for(self, about: Mapping[str, Any]) -> bool:
        """Whether the folder exists and holds what `about` describes."""
        if is_unfinished(self.journal_path):
            return False
        with closing(Journal(self.journal_path)) as journal:
            state = state_of(journal.events())
        return bool(state.events) and not _differences(state, about)

    def _check_nothing_lost(self) -> None:
        """Refuse where a new journal would remove the files of a lost one as leftovers."""
        if orphans := self.files.leftovers((), training=False):
            raise ArtifactError(
                f"{self.journal_path} is lost or empty, and {self.files.folder} holds {len(orphans)} files of a run. "
                "Take a good copy of run.sqlite, or name a new folder."
            )

    def _check_about(self, state: State, about: Mapping[str, Any]) -> None:
        if differ := _differences(state, about):
            instead = "" if state.trained else ", or drop the rounds that are done with --restart"
            raise SettingError(
                f"{self.path} is a run folder with other settings: {'; '.join(differ)}. "
                f"Use those, or a new folder{instead}."
            )

    def _check_exists(self) -> None:
        if is_unfinished(self.journal_path):
            self._check_nothing_lost()
            raise self._missing()

    def _missing(self) -> MissingRunError:
        return MissingRunError(
            f"There is no run folder at {self.path}. Make one with `fedup train --run {self.path}`, or name another "
            "with --run or the variable FEDUP_RUN."
        )

    def _check_free(self) -> None:
        if self.path.is_dir() and is_unfinished(self.journal_path):
            if foreign := sorted(entry.name for entry in self.path.iterdir() if entry.name not in _OURS):
                names = ", ".join(foreign[:3])
                raise SettingError(f"{self.path} is no run folder and not empty ({names}): name a new one.")
        elif self.path.exists() and not self.path.is_dir():
            raise SettingError(f"{self.path} is a file: name a folder.")


def _read_code(source: Path) -> tuple[dict[str, str], bytes]:
    """A Python file of the user: its record, with a name from its content, and the content."""
    with explained(f"read {source}"):
        content = source.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"name": f"{source.stem}-{digest[:16]}.py", "sha256": digest}, content


def _differences(state: State, about: Mapping[str, Any]) -> list[str]:
    wanted = json.loads(json.dumps(about))
    if any(event.kind == "added" for event in state.events):  # clients that joined have names since
        wanted["client_names"] = state.about.get("client_names")
    return [
        f"{key} is {_shown(state.about.get(key))} there and {_shown(wanted.get(key))} here"
        for key in sorted({*state.about, *wanted})
        if state.about.get(key) != wanted.get(key)
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class KnownJournal:
    """A journal that stays open between commits, and the state that it leads to.

    A writer that commits very often must not read all events again each time. They are read, and their chain is
    checked, when the journal is first opened, and whenever somebody else committed to it or took its place, or a commit
    failed.
    """

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._file: tuple[int, int] | None = None
        self._known: tuple[int, State] | None = None

    @contextmanager
    def opened(self, path: Path) -> Iterator[Journal]:
        """The journal, open for writing; what is known of it is dropped on an error."""
        about = path.stat()
        if self._journal is None or self._file != (about.st_dev, about.st_ino):
            self.close()
            self._journal, self._file = Journal(path, write=True), (about.st_dev, about.st_ino)
        try:
            yield self._journal
        except BaseException:
            self.close()
            raise

    def state(self, journal: Journal) -> State:
        """The state that its events lead to."""
        version = journal.version
        if self._known is None or self._known[0] != version:
            self._known = version, state_of(journal.events())
        return self._known[1]

    def note(self, state: State) -> None:
        """What own commits led to."""
        assert self._known is not None
        self._known = self._known[0], state

    def close(self) -> None:
        """Close it, and know nothing."""
        if self._journal is not None:
            self._journal.close()
        self._journal = self._known = None


class Writer:
    """The only process that may change the folder. Each `commit` is one step: done or not done, never half."""

    def __init__(self, run: Run, journal: Journal, state: State) -> None:
        self.run = run
        self._journal = journal
        self.state = state

    def put(self, kind: str, write: Callable[[Path], None]) -> FileRecord:
        """Write a file; it counts once an event that names it is committed."""
        return self.run.files.put(kind, write)

    def commit(self, kind: str, body: Mapping[str, Any]) -> Event:
        """Append an event, and then remove the files that it superseded."""
        return self.commit_together([(kind, body)])

    def commit_together(self, steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Event:
        """The same with several events, of which the last is returned: all of them are appended, or none."""
        state = self.state
        with self._journal.together():
            for kind, body in steps:
                trial = Event(len(state.events) + 1, "", kind, json.loads(json.dumps(body)), "")
                self._check_there(changed_by(state, trial))  # never write what cannot be read back
                state = after(state, self._journal.append(kind, body))
        self.state = state
        self.sweep()
        return state.events[-1]

    def sweep(self) -> None:
        """Remove files that the folder no longer needs."""
        self._check_there(self.state)
        self.run.files.sweep(self.state.files, training=self.state.trained is None)
        sweep_training(self.run.path, self.state)
        with explained(f"remove leftovers in {self.run.path}"):
            for partial in (self.run.path / "evidence").glob(".*.partial"):
                partial.unlink()

    def _check_there(self, state: State) -> None:
        missing = [record.name for record in state.files if not (self.run.files.folder / record.name).is_file()]
        if missing:
            names, folder = ", ".join(missing), self.run.files.folder
            raise ArtifactError(f"{names} is missing in {folder}. Take a good copy of the folder.")
