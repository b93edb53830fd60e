"""Answers as they come, on disk: a server that is killed before they are stored asks only for the rest.

They stay until whoever asked says that what it made of them is on disk (`settle`). A question under differential
privacy has a name for each node, which stays as long: asked again by that name, a node whose answer was lost sends the
same release once more in place of paying twice.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError
from fedup.files import write_text
from fedup.flower.wire import NONCE, Answer, Ask

_KIND = "answer"
_NAMES = "names.json"
_COLLECTION, _REQUEST = "collection-", "request-"


class Spool:
    """One folder for each model, one file for each node and question; without a folder answers are not kept."""

    def __init__(self, folder: str | Path | None, base: str) -> None:
        self._folder = None if folder is None else Path(folder) / base[:32]
        self._names = self._read_names()
        self._answered: set[str] = set()  # since answers were settled
        self._mine: set[str] = set()  # answers that came while this object lived

    def get(self, node: int, ask: Ask) -> Answer | None:
        """An answer that is here; None for one that is not, or is damaged: it is asked for again."""
        if self._folder is None or not self._path(node, ask).exists():
            return None
        try:
            arrays, header = load_tensors(self._path(node, ask), kind=_KIND)
            return Answer("ok", header["base"], header["details"], arrays, size=header["size"])
        except (ArtifactError, KeyError):
            return None

    def put(self, node: int, ask: Ask, answer: Answer) -> bool:
        """Keep an answer; whether it is kept. One without a single number cannot be, and needs no room."""
        if self._folder is None or not all(tensor.numel() for tensor in answer.arrays.values()):
            return False
        header = {"base": answer.base, "details": dict(answer.details), "size": answer.size}
        save_tensors(self._path(node, ask), answer.arrays, kind=_KIND, header=header)
        self._mine.add(_key(node, ask))
        return True

    def came_before(self, node: int, ask: Ask) -> bool:
        """Whether the answer that is here came in an earlier life of the server."""
        return _key(node, ask) not in self._mine

    def name(self, asks: Mapping[int, Ask]) -> dict[int, str]:
        """By node the name of what it is to release: the same each time until it is settled, also after a restart."""
        keys = {node: _key(node, ask) for node, ask in asks.items()}
        new = {key: secrets.token_hex(16) for key in keys.values() if key not in self._names}
        if new:
            self._names |= new
            self._write_names()  # before anybody is asked
        return {node: self._names[key] for node, key in keys.items()}

    def asked_before(self, asks: Mapping[int, Ask]) -> set[int]:
        """Nodes that were asked for this release, and may have made and charged it."""
        return {node for node, ask in asks.items() if _key(node, ask) in self._names}

    def answered(self, node: int, ask: Ask) -> None:
        """The release has come."""
        self._answered.add(_key(node, ask))

    def give_up(self, node: int, ask: Ask) -> None:
        """An answer of no use: whoever asks next asks for another one."""
        if self._folder is not None:
            self._path(node, ask).unlink(missing_ok=True)
        if self._names.pop(_key(node, ask), None) is not None:
            self._write_names()

    def settle(self, *, only_collection: bool = False) -> None:
        """What was made of the answers is stored: none stays here, and to ask again is to ask for something new. The
        names of what did not come stay: it may still be got."""
        which = _COLLECTION if only_collection else ""
        for key in [key for key in self._answered if key.startswith(which)]:
            self._names.pop(key, None)
            self._answered.discard(key)
        self._mine = {key for key in self._mine if not key.startswith(which)}
        for path in self._folder.glob(f"{which}*.safetensors") if self._folder is not None else ():
            path.unlink(missing_ok=True)
        self._write_names()

    def _read_names(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            told = json.loads((self._folder / _NAMES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        names = told if isinstance(told, dict) else {}
        return {key: name for key, name in names.items() if isinstance(name, str)}

    def _write_names(self) -> None:
        if self._folder is None:
            return
        if self._names:
            write_text(self._folder / _NAMES, json.dumps(self._names))
            return
        (self._folder / _NAMES).unlink(missing_ok=True)
        with suppress(OSError):  # others' files may be in it, or it was never made
            self._folder.rmdir()

    def _path(self, node: int, ask: Ask) -> Path:
        assert self._folder is not None
        return self._folder / f"{_key(node, ask)}.safetensors"


def _key(node: int, ask: Ask) -> str:
    whose = _COLLECTION if is_collection(ask) else _REQUEST
    return f"{whose}{node}-{hashlib.sha256(question_of(ask).encode()).hexdigest()[:32]}"


def is_collection(ask: Ask) -> bool:
    """Whether a client is asked for all that it holds."""
    return "labels" in ask.details and ask.details["labels"] is None


def question_of(ask: Ask) -> str:
    """By which the same question is known again, whatever it names its answer."""
    return json.dumps([ask.kind, {key: value for key, value in ask.details.items() if key != NONCE}], sort_keys=True)
