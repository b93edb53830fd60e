"""Sends questions over a Flower Grid and receives answers, with time limits, retries and counts of bytes."""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedup.clients.intake import Intake
from fedup.errors import ContactError, DataError, FingerprintError, SettingError
from fedup.flower.wire import QUERY, Answer, Ask, only_this_answer, read_answer, record_of, size_of, write_ask
from fedup.models.views import fingerprint
from fedup.statistics.traffic import Meter

_LONGEST_PAUSE_S = 30.0  # between tries
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # between looks for answers
_PULLED_AT_ONCE = 16  # answers
_PUSHED_AT_ONCE = 1024  # questions
_BOOKED_AT_ONCE, _BOOKED_BYTES = 512, 2**24  # answers that are counted and charged together, or fewer large ones
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


class Arrival(NamedTuple):
    """An answer that came, to which question; `is_late` where nobody waits for it any more."""

    node: int
    ask: Ask
    answer: Answer
    is_counted: bool = True  # else Flower's own word that nothing comes
    is_late: bool = False


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

    `arrived` is called with the answers that came, some hundred together, before any of them is checked or used;
    `meter` counts what is sent.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        delivery: Delivery,
        meter: Meter,
        arrived: Callable[[Sequence[Arrival]], None],
    ) -> None:
        self._grid, self._model, self.base = grid, model, fingerprint(model)
        self._delivery, self._meter, self._arrived = delivery, meter, arrived
        self._have: set[int] = set()  # nodes that have the weights for sure
        self._late: dict[str, tuple[int, Ask]] = {}  # by message: questions for releases that are not answered yet
        self.left_out: dict[int, str] = {}
        self.no_reply: set[int] = set()  # those of them that did not reply at all
        self.unusable: set[int] = set()  # of these, the nodes that did answer

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Leave nodes out that did answer."""
        self.left_out |= reasons
        self.unusable |= reasons.keys()

    def check_enough(self, answered: int, *, of: int, asked: Collection[int]) -> None:
        """Raise if too few nodes answered; those that did, and are not believed, are no reason to end a collection."""
        least = self._delivery.least_fraction
        excused = min(len(self.unusable.intersection(asked)), self._delivery.intake.most_excused(of))
        if answered < max(1, least * (of - excused) * (1 - 1e-9)):  # 0.28 of 25 are 7, not a little more
            reasons = "; ".join(f"node {node}: {why}" for node, why in sorted(self.left_out.items()))
            raise ContactError(
                f"{answered} of {of} nodes gave an answer of use, and least_fraction asks for {least:g}. "
                f"{reasons}. Ask again later, or with a smaller least_fraction."
            )

    def wave(
        self,
        asks: Mapping[int, Ask],
        read: Callable[[int, Answer], T],
        *,
        name_of: Callable[[int], str] = lambda node: "",
    ) -> dict[int, T]:
        """Ask each node its question until all have answered or no retry is left; returns the answers that fit.
        `name_of` names the release that a node is asked for."""
        if fingerprint(self._model) != self.base:
            raise FingerprintError("The model was changed after this contact was made for it: make a new contact.")
        fitting: dict[int, T] = {}
        waiting, tries = list(asks), 0
        self.left_out = {node: why for node, why in self.left_out.items() if node not in asks}
        self.unusable -= asks.keys()
        while waiting and tries <= self._delivery.retries:
            if tries:
                time.sleep(min(2.0 ** (tries - 1), _LONGEST_PAUSE_S))
            tries += 1
            with closing(self._answers(waiting, asks, name_of)) as answers:
                for node, answer in answers:
                    if answer.status == "lost":
                        continue  # as without a reply
                    try:
                        if answer.status != "ok":
                            raise DataError(f"{answer.status}: {answer.reason}")
                        fitting[node] = read(node, answer)
                    except DataError as error:  # a second try would give the same
                        self.left_out[node] = shown(str(error))
                        self.unusable |= {node} if answer.status in ("ok", "unreadable") else set()
            waiting = [node for node in waiting if node not in fitting and node not in self.left_out]
        silence = f"no answer within {self._delivery.timeout_s:g} s, asked {tries} times"
        self.left_out |= dict.fromkeys(waiting, silence)
        self.no_reply = (self.no_reply - asks.keys()) | {*waiting}
        for node in sorted(asks.keys() & self.left_out.keys()):
            _LOG.warning("node %d is left out: %s", node, self.left_out[node])
        return fitting

    def _answers(
        self, nodes: Sequence[int], asks: Mapping[int, Ask], name_of: Callable[[int], str]
    ) -> Generator[tuple[int, Answer], None, None]:
        """One round of messages, and a second one with weights to the nodes that lack them."""
        lacking: list[int] = []
        weights_to = {*nodes} - self._have if self._delivery.weights_at_once else ()
        for node, answer in self._send(nodes, asks, name_of, weights_to):
            if answer.status == "needs weights":
                self._have.discard(node)
                lacking.append(node)
            else:
                yield node, answer
        if lacking:
            yield from self._send(lacking, asks, name_of, {*lacking})

    def _send(
        self,
        to: Sequence[int],
        asks: Mapping[int, Ask],
        name_of: Callable[[int], str],
        weights_to: Collection[int],
    ) -> Iterator[tuple[int, Answer]]:
        """The answers that come in time, one by one, so that only some are in memory at once.

        (`Grid.send_and_receive` returns all of them together, and looks every three seconds.)
        """
        nodes: dict[str, int] = {}  # by message
        heavy = any(asks[node].needs_model for node in weights_to)
        weights = record_of(self._model.state_dict()) if heavy else None  # one record for all: it may be large
        try:
            for start in range(0, len(to), _PUSHED_AT_ONCE):
                some = [(node, asks[node].named(name_of(node))) for node in to[start : start + _PUSHED_AT_ONCE]]
                self._push(some, weights, weights_to, nodes)
            yield from self._receive(nodes, asks)
        finally:
            self._late |= {number: (node, asks[node]) for number, node in nodes.items() if asks[node].is_release}

    def _receive(self, nodes: dict[str, int], asks: Mapping[int, Ask]) -> Iterator[tuple[int, Answer]]:
        """The answers to these messages, which are taken out of `nodes`."""
        until, pause = time.monotonic() + self._delivery.timeout_s, _FIRST_PAUSE_S
        while nodes:
            for answers in self._look(nodes, asks):
                self._arrived([own for own in answers if own.is_counted])
                while answers:  # what was taken is freed
                    own = answers.pop()
                    if own.is_late:
                        continue
                    answer = own.answer
                    if answer.status == "ok" and answer.base != self.base:
                        answer = Answer("unreadable", self.base, reason="it answers for another model")
                    if answer.status == "ok" and own.ask.needs_model:
                        self._have.add(own.node)
                    yield own.node, answer
            if time.monotonic() >= until:
                return
            if nodes:
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _look(self, nodes: dict[str, int], asks: Mapping[int, Ask]) -> Iterator[list[Arrival]]:
        """The answers that are there, as many at once as are counted and charged together; the last one comes first.
        Their messages are taken out of `nodes`."""
        numbers, answers = list(nodes), list[Arrival]()
        for start in range(0, len(numbers), _PULLED_AT_ONCE):
            for reply in self._grid.pull_messages(numbers[start : start + _PULLED_AT_ONCE]):
                if (own := self._read(reply, nodes, asks)) is not None:
                    answers.append(own)
            if len(answers) >= _BOOKED_AT_ONCE or sum(own.answer.size for own in answers) >= _BOOKED_BYTES:
                yield answers[::-1]
                answers = []
        if answers:
            yield answers[::-1]

    def _read(self, reply: Message, nodes: dict[str, int], asks: Mapping[int, Ask]) -> "Arrival | None":
        """The answer in a reply; None for one to a message that nobody knows."""
        number = reply.metadata.reply_to_message_id
        node, late = nodes.pop(number, None), self._late.pop(number, None)
        if node is not None:
            return Arrival(node, asks[node], self._answer_in(reply), is_counted=not reply.has_error())
        if late is not None:
            return Arrival(*late, self._answer_in(reply), is_counted=not reply.has_error(), is_late=True)
        self._meter.came(None, 0 if reply.has_error() else size_of(reply.content))
        return None

    def _push(
        self,
        asks: Sequence[tuple[int, Ask]],
        weights: ArrayRecord | None,
        weights_to: Collection[int],
        nodes: dict[str, int],
    ) -> None:
        """Send these questions, some with weights; notes the node of each message."""
        if not asks:  # Flower refuses to send nothing
            return
        heavy = {node for node, ask in asks if node in weights_to and ask.needs_model}
        contents: dict[tuple[int, bool], RecordDict] = {}  # nodes with the same content share one object
        for node, ask in asks:
            if (key := (id(ask), node in heavy)) not in contents:
                contents[key] = write_ask(ask, weights if node in heavy else None)
        sizes = {key: size_of(content) for key, content in contents.items()}
        messages = [
            Message(contents[id(ask), node in heavy], node, f"query.{QUERY}", group_id=ask.kind, ttl=_secret_ttl())
            for node, ask in asks
        ]
        for number, (node, ask) in zip(self._grid.push_messages(messages), asks, strict=False):
            if number:  # else it was not sent
                nodes[number] = node
                self._meter.sent(sizes[id(ask), node in heavy])

    def _answer_in(self, reply: Message) -> Answer:
        if reply.has_error():
            if reply.error.code in _MAY_COME_BACK:
                return Answer("lost", self.base)
            return Answer("failed", self.base, reason=f"Flower says {reply.error.reason!r}")
        try:
            with only_this_answer():
                return read_answer(reply.content, most_bytes=self._delivery.most_bytes)
        except DataError as error:
            return Answer("unreadable", self.base, reason=str(error), size=size_of(reply.content))
