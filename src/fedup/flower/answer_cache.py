"""Answers on disk: a server that is killed before its result is stored asks only for the rest.

They stay until `settle` says that the result is stored. A question under differential privacy has a name for each node,
which stays as long: asked again by that name, a node sends the same release once more instead of paying twice.
"""

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

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
        # By question, and then by node: there may be very many nodes.
        self._names: defaultdict[_Topic, dict[int, bytes]] = defaultdict(dict)  # of releases that were asked for
        self._came: defaultdict[_Topic, set[int]] = defaultdict(set)  # answers that came to this object, not settled
        self._names_changed = False
        self._logs: dict[str, AnswerLog] = {}
        if self._folder is not None:
            self._logs = {prefix: AnswerLog(self._folder / f"{prefix}answers") for prefix in (_COLLECTION, _REQUEST)}
            with suppress(OSError, ValueError, TypeError, AttributeError):
                for key, name in json.loads((self._folder / _NAMES).read_text(encoding="utf-8")).items():
                    topic, node = _parsed(key)
                    self._names[topic][node] = bytes.fromhex(name)

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder for answers."""
        return self._folder is not None

    def get(self, node: int, ask: Ask) -> Answer | None:
        """A cached answer; None if there is none, or it is damaged: then the node is asked again."""
        topic = _topic(ask)
        return None if topic is None or not self._logs else self._logs[topic[0]].get(_key(topic, node))

    def put(self, node: int, ask: Ask, answer: Answer) -> bool:
        """Keep an answer; returns whether it is kept."""
        topic = _topic(ask)
        if topic is None or not self._logs:
            return False
        self._logs[topic[0]].put(_key(topic, node), answer)
        return True

    def sync(self) -> None:
        """Make all that was kept survive a power cut."""
        for log in self._logs.values():
            log.sync()
        if self._names_changed:
            self._write_names()

    def came(self, node: int, ask: Ask) -> None:
        """Note that an answer came and was counted."""
        if (topic := _topic(ask)) is not None:
            self._came[topic].add(node)

    def has_come(self, node: int, ask: Ask) -> bool:
        """Whether it came to this server, not to one that was killed."""
        return (topic := _topic(ask)) is not None and node in self._came.get(topic, ())

    def name(self, asks: Mapping[int, Ask]) -> tuple[Callable[[int], str], set[int]]:
        """How the release of a node is named, which stays the same until `settle`, also after a restart; and the nodes
        that were asked by that name before, and may have made and charged the release."""
        before, are_new = set[int](), False
        for node, ask in asks.items():
            if ask.is_release and (topic := _topic(ask)) is not None:
                if node in self._names.get(topic, ()):
                    before.add(node)
                else:
                    self._names[topic][node], are_new = secrets.token_bytes(16), True
        if are_new:
            self._write_names()  # before any node is asked

        def name_of(node: int) -> str:
            topic = _topic(asks[node]) if asks[node].is_release else None
            return "" if topic is None else self._names.get(topic, {}).get(node, b"").hex()

        return name_of, before

    def give_up(self, node: int, ask: Ask) -> None:
        """Forget the name of an unusable answer: the next question is for another release. (Written by `sync`: a server
        killed before gets the same unusable answer again.)"""
        if (topic := _topic(ask)) is not None:
            self._names_changed |= self._names.get(topic, {}).pop(node, None) is not None

    def settle(self, *, only_collection: bool = False) -> None:
        """Delete all answers: their results are stored, and the same question is a new one. Names of releases that did
        not come stay: these can still be had for nothing."""
        prefix = _COLLECTION if only_collection else ""
        for topic in [topic for topic in self._came if topic[0].startswith(prefix)]:
            names = self._names.get(topic, {})
            for node in self._came.pop(topic):
                names.pop(node, None)
        for topic in [topic for topic, names in self._names.items() if not names]:
            del self._names[topic]
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
        if any(self._names.values()):
            write_text(self._folder / _NAMES, "{" + ", ".join(self._written_names()) + "}")
            return
        (self._folder / _NAMES).unlink(missing_ok=True)
        with suppress(OSError):  # it holds other files, or does not exist
            self._folder.rmdir()

    def _written_names(self) -> Iterator[str]:
        for topic, names in self._names.items():
            for node, name in names.items():
                yield f"{json.dumps(_key(topic, node))}: {json.dumps(name.hex())}"


_Topic = tuple[str, str]  # the file that answers go to, and the question's digest


def _topic(ask: Ask) -> _Topic | None:
    """What an answer is to; None if it is not kept."""
    all_cells = "labels" in ask.details and ask.details["labels"] is None
    prefix = _COLLECTION if all_cells else _REQUEST if ask.is_release else ""
    return (prefix, ask.digest[:32]) if prefix else None


def _key(topic: _Topic, node: int) -> str:
    """The name of an answer on disk."""
    return f"{topic[0]}{node}-{topic[1]}"


def _parsed(key: str) -> tuple[_Topic, int]:
    """The opposite."""
    start, node, digest = key.rsplit("-", 2)
    return (f"{start}-", digest), int(node)
