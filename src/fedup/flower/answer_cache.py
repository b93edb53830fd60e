"""Answers on disk: a server that is killed before its result is stored asks only for the rest.

They stay until `settle` says that the result is stored. A question under differential privacy has a name for each node,
which stays as long: asked again by that name, a node sends the same release once more instead of paying twice.
"""

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedup.clients.messages import NONCE
from fedup.files import write_text
from fedup.flower.answer_log import AnswerLog
from fedup.flower.wire import Answer, Ask

_NAMES = "names.json"
_COLLECTION, _REQUEST = "collection-", "request-"


class AnswerCache:
    """One folder for each model, with two files: answers to a collection, and releases for requests. Without a folder
    answers are not kept."""

    def __init__(self, folder: str | Path | None, base: str) -> None:
        self._folder = None if folder is None else Path(folder) / base[:32]
        self._names: dict[str, str] = {}  # of releases that were asked for
        self._names_changed = False
        self._logs: dict[str, AnswerLog] = {}
        if self._folder is not None:
            self._logs = {prefix: AnswerLog(self._folder / f"{prefix}answers") for prefix in (_COLLECTION, _REQUEST)}
            with suppress(OSError, ValueError, TypeError):
                self._names = dict(json.loads((self._folder / _NAMES).read_text(encoding="utf-8")))
        self._came: set[str] = set()  # answers that this object saw, and that are not settled

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder for answers."""
        return self._folder is not None

    def get(self, node: int, ask: Ask) -> Answer | None:
        """A cached answer; None if there is none, or it is damaged: then the node is asked again."""
        key, log = self._place(node, ask)
        return log.get(key) if log is not None else None

    def put(self, node: int, ask: Ask, answer: Answer) -> bool:
        """Keep an answer; returns whether it is kept."""
        key, log = self._place(node, ask)
        if log is None:
            return False
        log.put(key, answer)
        return True

    def sync(self) -> None:
        """Make all that was kept survive a power cut."""
        for log in self._logs.values():
            log.sync()
        if self._names_changed:
            self._write_names()

    def came(self, node: int, ask: Ask) -> None:
        """Note that an answer came and was counted."""
        if key := _key(node, ask):
            self._came.add(key)

    def has_come(self, node: int, ask: Ask) -> bool:
        """Whether it came to this server, not to one that was killed."""
        return _key(node, ask) in self._came

    def name(self, asks: Mapping[int, Ask]) -> tuple[dict[int, Ask], set[int]]:
        """The questions, with names for releases, which stay the same until `settle`, also after a restart; and the
        nodes that were asked by that name before, and may have made and charged the release."""
        keys = {node: _key(node, ask) for node, ask in asks.items() if ask.is_release}
        before = {node for node, key in keys.items() if key in self._names}
        if keys.keys() - before:
            self._names |= {key: secrets.token_hex(16) for node, key in keys.items() if node not in before}
            self._write_names()  # before any node is asked
        details = {node: {**asks[node].details, NONCE: self._names[key]} for node, key in keys.items()}
        return {**asks, **{node: replace(asks[node], details=named) for node, named in details.items()}}, before

    def give_up(self, node: int, ask: Ask) -> None:
        """Forget the name of an unusable answer: the next question is for another release. (Written by `sync`: a server
        killed before gets the same unusable answer again.)"""
        self._names_changed |= self._names.pop(_key(node, ask), None) is not None

    def settle(self, *, only_collection: bool = False) -> None:
        """Delete all answers: their results are stored, and the same question is a new one. Names of releases that did
        not come stay: these can still be had for nothing."""
        prefix = _COLLECTION if only_collection else ""
        settled = {key for key in self._came if key.startswith(prefix)}
        self._came -= settled
        self._names = {key: name for key, name in self._names.items() if key not in settled}
        for own, log in self._logs.items():
            if own.startswith(prefix):
                log.remove()
        for path in self._folder.glob(f"{prefix}*.safetensors") if self._folder is not None else ():
            path.unlink(missing_ok=True)  # of an earlier fedup
        self._write_names()

    def _write_names(self) -> None:
        self._names_changed = False
        if self._folder is None:
            return
        if self._names:
            write_text(self._folder / _NAMES, json.dumps(self._names))
            return
        (self._folder / _NAMES).unlink(missing_ok=True)
        with suppress(OSError):  # it holds other files, or does not exist
            self._folder.rmdir()

    def _place(self, node: int, ask: Ask) -> tuple[str, AnswerLog | None]:
        """The key of an answer, and its file; None if it is not kept."""
        key = _key(node, ask)
        return key, next((log for prefix, log in self._logs.items() if key.startswith(prefix)), None)


def _key(node: int, ask: Ask) -> str:
    """The name of an answer on disk; empty if it is not kept."""
    all_cells = "labels" in ask.details and ask.details["labels"] is None
    prefix = _COLLECTION if all_cells else _REQUEST if ask.is_release else ""
    return f"{prefix}{node}-{ask.digest[:32]}" if prefix else ""
