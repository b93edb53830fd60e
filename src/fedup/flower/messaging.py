"""Sends questions over a Flower Grid and receives answers, with time limits, retries and counts of bytes."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedup.clients.intake import Intake
from fedup.clients.messages import NONCE
from fedup.errors import DataError, FingerprintError, SettingError
from fedup.flower.wire import QUERY, Answer, Ask, only_this_answer, read_answer, record_of, size_of, write_ask
from fedup.models.views import fingerprint
from fedup.statistics.traffic import Meter

_LONGEST_PAUSE_S = 30.0  # between tries
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # between looks for answers
_PULLED_AT_ONCE = 16  # answers
_MAY_COME_BACK = (3, 4, 5)  # Flower's codes for a message, reply or node that is not available; it exports none
_TTL_S = 12 * 3600.0
_LONGEST_REASON = 600  # characters
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Delivery:
    """How messages travel. A node that does not answer within `timeout_s` is asked again up to `retries` times, after
    longer and longer pauses. Answers from less than `least_fraction` of the nodes are an error; a node that did answer,
    and whose answer is not used, does not count (`Intake.most_left_out`). An answer of more than `most_bytes` is
    refused. `intake` says what becomes of nodes whose answers disagree with all others.

    Weights go to nodes that say they lack them. With `weights_at_once` they go with the first question to each node:
    right after training nobody has them, and this saves a round of messages. With `half` centroids come in half
    precision.
    """

    timeout_s: float = 60.0
    retries: int = 2
    least_fraction: float = 1.0
    weights_at_once: bool = False
    half: bool = False
    most_bytes: int = 16_000_000
    intake: Intake = field(default_factory=Intake)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.retries < 0 or not 0 < self.least_fraction <= 1:
            raise SettingError(
                "timeout_s must be above 0, retries 0 or more, least_fraction in (0, 1]; found "
                f"{self.timeout_s}, {self.retries}, {self.least_fraction}."
            )


def shown(text: str) -> str:
    """A text of a stranger for logs and terminals: one line, not long, without control characters.

    >>> shown("no\\n\\x1b[31mnode 3 is fine" + "!" * 1000)[:24]
    'no  [31mnode 3 is fine!!'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST_REASON])


def _secret_ttl() -> float:
    """Flower's usual time limit of a message, with random digits.

    Flower's number of a message is a hash of all that is in it, and the SuperLink takes a reply for whoever knows the
    number. A node that got the same question could compute the numbers of the others' messages.
    """
    return _TTL_S + 60.0 * secrets.randbelow(2**40) / 2**40


class Messenger:
    """Asks nodes about one model; `left_out` says which gave no usable answer, and why.

    `arrived` is called with each answer when it comes, before it is checked; `meter` counts what is sent.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        delivery: Delivery,
        meter: Meter,
        arrived: Callable[[int, Ask, Answer], None],
    ) -> None:
        self._grid, self._model, self.base = grid, model, fingerprint(model)
        self._delivery, self._meter, self._arrived = delivery, meter, arrived
        self._have: set[int] = set()  # nodes that have the weights for sure
        self._late: dict[str, tuple[int, Ask]] = {}  # by message: questions for releases that are not answered yet
        self.left_out: dict[int, str] = {}
        self.unusable: set[int] = set()  # of these, the nodes that did answer

    def wave(self, asks: Mapping[int, Ask], read: Callable[[int, Answer], T]) -> dict[int, T]:
        """Ask each node its question until all have answered or no retry is left; returns the answers that fit."""
        if fingerprint(self._model) != self.base:
            raise FingerprintError("The model was changed after this contact was made for it: make a new contact.")
        fitting: dict[int, T] = {}
        waiting, tries = dict(asks), 0
        self.left_out = {node: why for node, why in self.left_out.items() if node not in asks}
        self.unusable -= asks.keys()
        while waiting and tries <= self._delivery.retries:
            if tries:
                time.sleep(min(2.0 ** (tries - 1), _LONGEST_PAUSE_S))
            tries += 1
            for node, answer in self._answers(dict(waiting)):
                if answer.status == "lost":
                    continue  # as without a reply
                del waiting[node]
                try:
                    if answer.status != "ok":
                        raise DataError(f"{answer.status}: {answer.reason}")
                    fitting[node] = read(node, answer)
                except DataError as error:  # a second try would give the same
                    self.left_out[node] = shown(str(error))
                    self.unusable |= {node} if answer.status in ("ok", "unreadable") else set()
        silence = f"no answer within {self._delivery.timeout_s:g} s, asked {tries} times"
        self.left_out |= dict.fromkeys(waiting, silence)
        for node in sorted(asks.keys() & self.left_out.keys()):
            _LOG.warning("node %d is left out: %s", node, self.left_out[node])
        return fitting

    def _answers(self, asks: Mapping[int, Ask]) -> Iterator[tuple[int, Answer]]:
        """One round of messages, and a second one with weights to the nodes that lack them."""
        lacking: dict[int, Ask] = {}
        for node, answer in self._send(asks, asks.keys() - self._have if self._delivery.weights_at_once else ()):
            if answer.status == "needs weights":
                self._have.discard(node)
                lacking[node] = asks[node]
            else:
                yield node, answer
        if lacking:
            yield from self._send(lacking, lacking)

    def _send(self, asks: Mapping[int, Ask], weights_to: Collection[int]) -> Iterator[tuple[int, Answer]]:
        """The answers that come in time, one by one, so that only some are in memory at once.

        (`Grid.send_and_receive` returns all of them together, and looks every three seconds.)
        """
        nodes = self._push(asks, weights_to)
        until, pause = time.monotonic() + self._delivery.timeout_s, _FIRST_PAUSE_S
        while nodes:
            numbers = list(nodes)
            for start in range(0, len(numbers), _PULLED_AT_ONCE):
                for reply in self._grid.pull_messages(numbers[start : start + _PULLED_AT_ONCE]):
                    number = reply.metadata.reply_to_message_id
                    node, late = nodes.pop(number, None), self._late.pop(number, None)
                    if node is None:  # to an earlier message: it is counted, but nobody waits for it
                        size = 0 if reply.has_error() else size_of(reply.content)
                        self._read(reply, *late) if late else self._meter.came(None, size)
                    else:
                        answer = self._read(reply, node, asks[node])
                        if answer.status == "ok" and asks[node].needs_model:
                            self._have.add(node)
                        yield node, answer
            if time.monotonic() >= until:
                return
            if nodes:
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _push(self, asks: Mapping[int, Ask], weights_to: Collection[int]) -> dict[str, int]:
        """Send the questions, some with weights; returns the node of each message."""
        contents: dict[tuple[int, bool], RecordDict] = {}  # nodes with the same content share one object
        heavy = {node for node in weights_to if asks[node].needs_model}
        weights = record_of(self._model.state_dict()) if heavy else None  # one record for all: it may be large
        messages = []
        for node, ask in asks.items():
            key = id(ask), node in heavy
            if key not in contents:
                contents[key] = write_ask(ask, weights if node in heavy else None)
            messages.append(Message(contents[key], node, f"query.{QUERY}", group_id=ask.kind, ttl=_secret_ttl()))
        sizes = {key: size_of(content) for key, content in contents.items()}
        pushed = zip(self._grid.push_messages(messages), asks, strict=False)
        nodes = {number: node for number, node in pushed if number}  # an unsent message has no number
        for number, node in nodes.items():
            self._meter.sent(sizes[id(asks[node]), node in heavy])
            if NONCE in asks[node].details:
                self._late[number] = node, asks[node]
        return nodes

    def _read(self, reply: Message, node: int, ask: Ask) -> Answer:
        """The answer in a reply; it is counted first."""
        if reply.has_error():
            if reply.error.code in _MAY_COME_BACK:
                return Answer("lost", self.base)
            return Answer("failed", self.base, reason=f"Flower says {reply.error.reason!r}")
        try:
            with only_this_answer():
                answer = read_answer(reply.content, most_bytes=self._delivery.most_bytes)
        except DataError as error:
            answer = Answer("unreadable", self.base, reason=str(error), size=size_of(reply.content))
        self._arrived(node, ask, answer)
        if answer.base != self.base and answer.status == "ok":
            return Answer("unreadable", self.base, reason="it answers for another model")
        return answer
