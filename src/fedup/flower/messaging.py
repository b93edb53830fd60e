"""Questions sent over a Flower Grid and answers taken from it, with time limits, retries and counts of bytes."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import nn

from fedup.errors import DataError, FingerprintError
from fedup.flower.wire import NONCE, QUERY, Answer, Ask, read_answer, record_of, size_of, write_ask
from fedup.models.views import fingerprint
from fedup.statistics.traffic import Meter

_LONGEST_PAUSE_S = 30.0  # between tries
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # between looks for answers
_PULLED_AT_ONCE = 16  # answers
_MAY_COME_BACK = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
T = TypeVar("T")


class Messenger:
    """Asks nodes about one model; `left_out` says which gave no answer of use, and why.

    `arrived` is called with each answer as it comes, before anybody looks into it; `meter` counts what is sent.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        *,
        timeout: float,
        retries: int,
        weights_at_once: bool,
        most_bytes: int,
        meter: Meter,
        arrived: Callable[[int, Ask, Answer], None],
        tell: Callable[[str], None],
    ) -> None:
        self._grid, self._model, self.base = grid, model, fingerprint(model)
        self._timeout, self._retries, self._most_bytes, self._tell = timeout, retries, most_bytes, tell
        self._weights_at_once, self._meter, self._arrived = weights_at_once, meter, arrived
        self._have: set[int] = set()  # nodes that have shown that they have the weights
        self._late: dict[str, tuple[int, Ask]] = {}  # by message: releases that were asked for and did not come in time
        self.left_out: dict[int, str] = {}

    def wave(self, asks: Mapping[int, Ask], read: Callable[[int, Answer], T]) -> dict[int, T]:
        """Ask nodes, each its own question, until all have answered or the retries are spent; the answers that fit."""
        if fingerprint(self._model) != self.base:
            raise FingerprintError("The model was changed after this contact was made for it: make another.")
        found: dict[int, T] = {}
        waiting, tries = dict(asks), 0
        self.left_out = {node: why for node, why in self.left_out.items() if node not in asks}
        while waiting and tries <= self._retries:
            if tries:
                time.sleep(min(2.0 ** (tries - 1), _LONGEST_PAUSE_S))
            tries += 1
            for node, answer in self._answers(dict(waiting)):
                if answer.status == "lost":
                    continue  # as if nothing had come
                del waiting[node]
                try:
                    if answer.status != "ok":
                        raise DataError(f"{answer.status}: {answer.reason}")
                    found[node] = read(node, answer)
                except DataError as error:  # asking again would bring the same
                    self.left_out[node] = str(error)
        self.left_out |= dict.fromkeys(waiting, f"no answer within {self._timeout:g} s, asked {tries} times")
        for node in asks:
            if node in self.left_out:
                self._tell(f"node {node} is left out: {self.left_out[node]}")
        return found

    def _answers(self, asks: Mapping[int, Ask]) -> Iterator[tuple[int, Answer]]:
        """One round of messages; a second one with weights to those nodes alone that lack them."""
        short, known = [], self._have if self._weights_at_once else asks.keys()
        for node, answer in self._send(self._with_weights(asks, asks.keys() - known)):
            if answer.status == "needs weights":
                self._have.discard(node)
                short.append(node)
            else:
                yield node, answer
        if short:
            yield from self._send(self._with_weights({node: asks[node] for node in short}, short))

    def _with_weights(self, asks: Mapping[int, Ask], nodes: Collection[int]) -> dict[int, Ask]:
        """The same questions, with weights for some of the nodes. Nodes that get the same get the same object."""
        made: dict[int, Ask] = {}
        record = record_of(self._model.state_dict()) if nodes else None  # one for all: it may be large
        for node in nodes:
            ask = asks[node]
            if ask.needs_model:
                made.setdefault(id(ask), replace(ask, record=record))
        return {node: made.get(id(ask), ask) if node in nodes else ask for node, ask in asks.items()}

    def _send(self, asks: Mapping[int, Ask]) -> Iterator[tuple[int, Answer]]:
        """What comes back in time, as it comes, so that no more than some answers are in memory at once.

        (`Grid.send_and_receive` gives all of them together, and looks for them every three seconds.)
        """
        contents = {id(ask): write_ask(ask) for ask in {id(ask): ask for ask in asks.values()}.values()}
        sizes = {key: size_of(content) for key, content in contents.items()}
        messages = [_message(node, ask, contents[id(ask)]) for node, ask in asks.items()]
        pushed = zip(self._grid.push_messages(messages) if messages else (), asks, strict=False)
        nodes = {number: node for number, node in pushed if number}  # by message; what could not be sent has no number
        for number, asked in nodes.items():
            self._meter.sent(sizes[id(asks[asked])])
            if NONCE in asks[asked].details:
                self._late[number] = asked, replace(asks[asked], record=None)  # weights need not wait for it
        until, pause = time.monotonic() + self._timeout, _FIRST_PAUSE_S
        while nodes:
            for some in _batched(list(nodes), _PULLED_AT_ONCE):
                for reply in self._grid.pull_messages(some):
                    number = reply.metadata.reply_to_message_id
                    node, late = nodes.pop(number, None), self._late.pop(number, None)
                    if node is None:  # to an earlier message: it counts, but nobody waits for it any more
                        self._judged(reply, *late) if late else self._meter.came(None, _size_of(reply))
                    else:
                        answer = self._judged(reply, node, asks[node])
                        if answer.status == "ok" and asks[node].needs_model:
                            self._have.add(node)
                        yield node, answer
            if time.monotonic() >= until:
                return
            if nodes:
                time.sleep(pause)
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _judged(self, reply: Message, node: int, ask: Ask) -> Answer:
        if reply.has_error():
            if reply.error.code in _MAY_COME_BACK:
                return Answer("lost", self.base)
            return Answer("failed", self.base, reason=f"Flower says {reply.error.reason!r}")
        try:
            answer = read_answer(reply.content, most_bytes=self._most_bytes)
        except DataError as error:
            answer = Answer("failed", self.base, reason=str(error), size=_size_of(reply))
        self._arrived(node, ask, answer)
        if answer.base != self.base and answer.status == "ok":
            return Answer("failed", self.base, reason="it answers for another model")
        return answer


def _message(node: int, ask: Ask, content: RecordDict) -> Message:
    return Message(content, dst_node_id=node, message_type=f"query.{QUERY}", group_id=ask.kind)


def _size_of(reply: Message) -> int:
    return 0 if reply.has_error() else size_of(reply.content)


def _batched(values: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    """Values in groups of so many; `itertools.batched` is not in Python 3.11."""
    return (values[start : start + size] for start in range(0, len(values), size))
