"""A writer that holds the folder's lock only around its commits, for answers that take minutes because nodes do."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedup.errors import ChangedError
from fedup.run.folder import KnownJournal, Run, Writer
from fedup.run.journal import Event
from fedup.run.state import FileRecord, State

_WAIT_S = 600.0  # for another writer: what nodes have sent must not be lost
# Made from what the folder held. Other events (charges, bindings) are facts, whatever others did meanwhile.
_ANSWERS = (
    *("trained", "collected", "unlearned", "restored", "renewed", "waiting", "withdrawn", "purged", "declined"),
    *("continued", "retrained"),
)
# They change no answer.
_QUEUE = ("queued", "restore queued", "withdrawn", "postponed", "refused", "declined", "evaluated", "evidenced")


class BriefWriter(Writer):
    """Takes the lock with the first file of a step, and gives it back with the commit that names it.

    Others may write between the commits. If they changed what an answer is made from, or took back the request that
    is being answered (`answering`), the next file or commit raises ChangedError, and nothing is written. The same holds
    if one of the requests that a new model was trained `without` is taken back, or is to be.
    """

    def __init__(
        self, run: Run, command: str, state: State, *, answering: str | None = None, without: Collection[str] = ()
    ) -> None:
        self.run, self.state = run, state
        self._command, self._answering, self._without = command, answering, frozenset(without)
        self._held, self._inner, self._known = ExitStack(), list[Writer](), KnownJournal()
        self._own: set[int] = set()  # events of this writer
        self._first = len(state.events)
        self._basis, self._ids = self._basis_of(state), _ids_of(state)

    def __enter__(self) -> "BriefWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        self._known.close()

    def put(self, kind: str, write: Callable[[Path], None]) -> FileRecord:
        inner = self._acquire()
        self._check_unchanged(inner.state)
        return inner.put(kind, write)

    def commit_together(self, steps: Iterable[tuple[str, Mapping[str, Any]]]) -> Event:
        inner, kinds = self._acquire(), set[str]()

        def checked() -> Iterator[tuple[str, Mapping[str, Any]]]:
            for kind, body in steps:
                if kind in _ANSWERS:
                    self._check_unchanged(inner.state, body)
                kinds.add(kind)
                yield kind, body

        try:
            before = len(inner.state.events)
            event = inner.commit_together(checked())
            self._own.update(range(before + 1, event.seq + 1))
            self.state = inner.state
            if not kinds.isdisjoint(_ANSWERS):
                self._basis, self._ids = self._basis_of(inner.state), _ids_of(inner.state)
        except BaseException:  # what is on disk now is read before the next commit
            self._release()
            self._known.close()
            raise
        self._release()
        return event

    def sweep(self) -> None:
        self._acquire().sweep()

    def _acquire(self) -> Writer:
        if not self._inner:
            writing = self.run.writing(self._command, wait_s=_WAIT_S, known=self._known)
            self._inner.append(self._held.enter_context(writing))
        return self._inner[0]

    def _release(self) -> None:
        self._inner.clear()
        self._held.close()

    def _check_unchanged(self, now: State, body: Mapping[str, Any] | None = None) -> None:
        """Raise if others changed what the answer is made from, or gave away an id that it uses."""
        foreign = [event for event in now.events[self._first :] if event.seq not in self._own]
        changed = sorted({event.kind for event in foreign if event.kind not in _QUEUE})
        entries = [*(body or {}).get("requests", ()), *(body or {}).get("declined", ())]
        ids = {own["id"] for own in entries if isinstance(own, dict)}
        if changed or self._basis_of(now) != self._basis or ids & (_ids_of(now) - self._ids):
            raise ChangedError(
                f"Another process changed {self.run.path} meanwhile ({', '.join(changed) or 'the queue'}). This answer "
                "was not stored: make it anew."
            )

    def _basis_of(self, state: State) -> tuple[object, ...]:
        """What an answer is made from, and whether its request still waits for it."""
        requests = [request.id for request in (*state.active, *state.open, *state.waiting)]
        is_queued = self._answering in [request.id for request in state.queued]
        left_out = [own.id for own in state.standing if own.id in self._without and not own.is_returning]
        return state.base, *state.files, *requests, is_queued, *left_out


def _ids_of(state: State) -> set[str]:
    return {request.id for request in state.requests}
