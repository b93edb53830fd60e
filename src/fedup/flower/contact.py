"""The server's side: questions asked over a Flower Grid, and what becomes of the answers."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flwr.serverapp import Grid
from torch import Tensor, nn

from fedup.clients import messages
from fedup.clients.checks import client_number
from fedup.clients.labels import WhoQuestion
from fedup.clients.model_facts import ModelFacts
from fedup.clients.protocol import check_budgets, release_of
from fedup.clients.question import PrivateQuestion, Question
from fedup.errors import ContactError, DataError, RequestError, SettingError
from fedup.flower.answer_cache import Spool, is_collection
from fedup.flower.messaging import Messenger
from fedup.flower.wire import NONCE, ROW, Answer, Ask, row_of
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget, check_known
from fedup.statistics.traffic import Meter, Traffic

MOST_BYTES = 16_000_000  # of one answer
_LARGEST_SPENT = 1e12  # μ²: of a client that has released everything a million times
A = TypeVar("A")
_Charge = tuple[DP, str, str]  # the guarantee, what is charged, the release's name


@dataclass(frozen=True)
class _Taken:
    """A node's answer that fits; it may wait on disk."""

    client: int
    load: Callable[[], Any]


class GridContact:
    """Clients behind a Flower Grid; `model` holds the trained weights, and `example` is one blank row of its inputs.

    A node that does not answer within `timeout` seconds is asked again, `retries` times, after longer and longer
    pauses; one that refuses, or whose answer does not fit, is left out, and `left_out` says why. Fewer than
    `least_fraction` of the nodes is an error.

    A release under differential privacy is charged to the `ledger` the moment it comes, whatever becomes of the
    request, and once, whatever it is called; where a node has spent more by its own account, the ledger is corrected.

    With a `folder` answers to a collection, and releases for a request, are kept there as they come: a server that was
    killed asks only for what is missing. They go once `settled` says that what was made of them is stored, or with the
    next collection; `RunServer` sees to it.

    Weights travel to nodes that say they lack them; with `weights_at_once` they go with the first question to each that
    has not shown that it has them: right after training nobody has the final ones, and a round of messages is saved.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        *,
        example: Tensor,
        num_classes: int,
        timeout: float = 60.0,
        retries: int = 2,
        least_fraction: float = 1.0,
        folder: str | Path | None = None,
        half: bool = False,
        weights_at_once: bool = False,
        most_bytes: int = MOST_BYTES,
        ledger: Ledger | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not timeout > 0 or retries < 0 or not 0 < least_fraction <= 1 or num_classes < 1:
            raise SettingError(
                "timeout must be above 0, retries 0 or more, least_fraction in (0, 1], num_classes 1 or more; found "
                f"{timeout}, {retries}, {least_fraction}, {num_classes}."
            )
        self._grid, self._row, self._classes = grid, row_of(example[:1]), num_classes
        self._facts = ModelFacts(model, example, num_classes)
        self._least = least_fraction
        self._half = half
        self._meter = Meter()
        self._messenger = Messenger(
            grid,
            model,
            timeout=timeout,
            retries=retries,
            weights_at_once=weights_at_once,
            most_bytes=most_bytes,
            meter=self._meter,
            arrived=self._arrived,
            tell=tell,
        )
        self._ledger = Ledger() if ledger is None else ledger
        self._spool = Spool(folder, self._messenger.base)
        self._nodes: dict[int, int] = {}  # by client
        self._clients: dict[int, int] = {}  # by node
        self._unknown: Counter[int] = Counter()  # by node that is not known to be a client: bytes that came from it
        self._claimed: dict[int, float] = {}  # by such a node: what it says to have spent
        self._uncharged: dict[int, list[_Charge]] = {}  # by such a node: releases in the name of somebody else's client
        self._collected = False  # whether all answers to a collection were taken, which may still be on disk

    @property
    def left_out(self) -> Mapping[int, str]:
        """Nodes that gave no answer of use, and why."""
        return self._messenger.left_out

    @property
    def silent(self) -> Mapping[int, str]:
        """The same by client."""
        return {client: self.left_out[node] for client, node in self._nodes.items() if node in self.left_out}

    @property
    def traffic(self) -> Traffic:
        """All messages so far, as serialised: retries, weights and refusals, too."""
        return self._meter.traffic

    @property
    def messages(self) -> int:
        """Sent so far."""
        return self._meter.messages

    @property
    def bytes_up(self) -> int:
        """From nodes, as serialised."""
        return self._meter.bytes_up

    @property
    def bytes_down(self) -> int:
        """To nodes, as serialised."""
        return self._meter.bytes_down

    @property
    def measures_by_default(self) -> bool:
        """Each question is a message of seconds: client and class requests are answered without any."""
        return False

    @property
    def num_classes(self) -> int:
        return self._classes

    @property
    def ledger(self) -> Ledger:
        """What the server knows that clients have spent; each node has its own, which decides."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def settled(self, *, only_collection: bool = False) -> None:
        """What was made of the answers so far is stored: none stays on disk, and to ask again is to ask anew. With
        `only_collection` releases for a request stay, which may not have been answered yet."""
        self._spool.settle(only_collection=only_collection)
        self._collected = False

    @property
    def clients(self) -> Sequence[int]:
        """All that answered so far; on first use they are asked who they are."""
        if not self._nodes:
            self._greet()
        return sorted(self._nodes)

    def check(self, request: Forget) -> None:
        check_known(request, clients=self.clients, num_classes=self._classes)
        if set(self.clients) <= request.client_ids:
            raise RequestError(f"To {request} leaves no training row. Take the model out of service instead.")

    # --- asking

    def ask(self, questions: Mapping[int, Question[A]], *, optional: Collection[int] = ()) -> Iterator[tuple[int, A]]:
        nodes = {client: self._node_of(client) for client in questions}
        own = {nodes[client]: question for client, question in questions.items()}
        taken = self._ask_nodes(own, {node: client for client, node in nodes.items()})
        missing = [client for client, node in nodes.items() if node not in taken and client not in optional]
        if missing:
            client = missing[0]
            why = self.left_out[nodes[client]]
            raise ContactError(f"Client {client} gave no answer of use: {why}. Nothing was changed.")
        return ((client, taken[node].load()) for client, node in nodes.items() if node in taken)

    def ask_everyone(
        self, question: Question[A], *, instead: Mapping[int, Question[A]] | None = None, but: Collection[int] = ()
    ) -> Iterator[tuple[int, A]]:
        """Who they are is asked first only where it matters."""
        if self._collected:  # what is on disk is of the collection before
            self.settled(only_collection=True)
        if instead or but:
            self._greet()
            own = {self._nodes[client]: (instead or {}).get(client, question) for client in self.clients}
            asked = {node: one for node, one in own.items() if self._clients[node] not in but}
        else:
            asked = dict.fromkeys(self._all_nodes(), question)
        taken = self._ask_nodes(asked, {})
        self._meet({node: answer.client for node, answer in taken.items()})
        lost = {node for client, node in self._nodes.items() if client not in but} - asked.keys()
        self._messenger.left_out |= dict.fromkeys(lost, "it is not connected any more")
        self._enough(len(asked) + len(lost), len(taken))
        return self._collection(taken)

    def _collection(self, taken: Mapping[int, _Taken]) -> Iterator[tuple[int, Any]]:
        waiting = sorted(taken.values(), key=lambda one: one.client, reverse=True)
        while waiting:  # those that are taken need no room any more
            answer = waiting.pop()
            yield answer.client, answer.load()
        self._collected = True

    def _ask_nodes(self, questions: Mapping[int, Question[Any]], clients: Mapping[int, int]) -> dict[int, _Taken]:
        """The answers that fit, by node: from disk what is there of them, and the others in one wave. `clients` says
        which client a node has to be, where that is known."""
        made = {id(one): self._ask(one) for one in {id(one): one for one in questions.values()}.values()}
        asks = {node: made[id(one)] for node, one in questions.items()}  # nodes that are asked the same get one object
        asked_before, asks = self._spool.asked_before(asks), self._named(asks)
        taken = self._from_disk(asks, clients)
        for node in taken:
            self._messenger.left_out.pop(node, None)
        left = {node: ask for node, ask in asks.items() if node not in taken}
        self._check_budgets(left, asked_before)
        came = self._messenger.wave(left, lambda node, answer: self._take(node, asks[node], answer, clients.get(node)))
        return taken | came

    def _ask(self, question: Question[Any]) -> Ask:
        details, arrays = question.to_message()
        if "half" in details:
            details = {**details, "half": self._half}
        told = {**details, "num_classes": self._classes, ROW: self._row}
        return Ask(question.kind, self._messenger.base, told, arrays=arrays, question=question)

    def _named(self, asks: Mapping[int, Ask]) -> dict[int, Ask]:
        """The same questions; those for a release under DP by the name that they have until they are settled."""
        names = self._spool.name({node: ask for node, ask in asks.items() if ask.is_release})
        return {
            node: replace(ask, details={**ask.details, NONCE: names[node]}) if node in names else ask
            for node, ask in asks.items()
        }

    def _check_budgets(self, asks: Mapping[int, Ask], asked_before: Collection[int]) -> None:
        """What may not be had is not asked for; what a client has paid for already, and not sent, costs nothing."""
        if not self._ledger.budgets or not asks:
            return
        if any(node not in self._clients for node in asks):  # nobody is asked before it is known whose budget it has
            self._greet()
        questions = {}
        for client in self.clients:
            node = self._nodes[client]
            question = asks[node].question if node in asks else None
            if question is None or isinstance(question, WhoQuestion):
                continue
            paid = (
                isinstance(question, PrivateQuestion)
                and node in asked_before
                and self._ledger.uncovered(client) >= question.dp.mu**2 * (1 - 1e-9)
            )
            if not paid:
                questions[client] = question
        check_budgets(self._ledger, questions)

    # --- what comes

    def _take(self, node: int, ask: Ask, answer: Answer, expected: int | None) -> _Taken:
        """An answer that fits; where there is a folder, collections and releases wait there, and not in memory."""
        try:
            client, value = self._read(ask, answer, expected)
        except DataError:  # it was released and charged: by the same name it would come again
            self._spool.give_up(node, ask)
            raise
        kept = (ask.is_release or is_collection(ask)) and self._spool.put(node, ask, answer)
        return _Taken(client, partial(self._again, node, ask) if kept else lambda: value)

    def _read(self, ask: Ask, answer: Answer, expected: int | None = None) -> tuple[int, Any]:
        assert ask.question is not None  # made here
        client = client_number(answer.details)
        if expected not in (None, client):
            raise DataError(f"it was client {expected} before, and says now that it is {client}")
        return client, ask.question.read(answer.details, answer.arrays, self._facts)

    def _again(self, node: int, ask: Ask) -> Any:
        answer = self._spool.get(node, ask)
        if answer is None:
            raise DataError(f"The answer of node {node} was taken away from the folder meanwhile. Collect again.")
        return self._read(ask, answer)[1]

    def _from_disk(self, asks: Mapping[int, Ask], clients: Mapping[int, int]) -> dict[int, _Taken]:
        """Answers that are kept; one that does not fit any more is asked for again."""
        taken = {}
        for node, ask in asks.items():
            answer = self._spool.get(node, ask) if ask.is_release or is_collection(ask) else None
            with suppress(DataError):
                if answer is not None:
                    client, _ = self._read(ask, answer, clients.get(node))
                    taken[node] = _Taken(client, partial(self._again, node, ask))
                    self._arrived(node, ask, answer, size=answer.size if self._spool.came_before(node, ask) else 0)
        return taken

    def _arrived(self, node: int, ask: Ask, answer: Answer, *, size: int | None = None) -> None:
        """Count an answer and, if it is a release under DP, charge it: before anything else, since the node has. One
        that is read from disk counts with another `size`; what it says of the node's account is old."""
        question = ask.question
        assert question is not None  # made here
        told = answer.status == "ok" and not isinstance(question, WhoQuestion)
        name = messages.identity_of(answer.arrays) if told and ask.is_release else ""
        client, reported = self._client_of(node, answer), _spent(answer) if size is None else None
        size = answer.size if size is None else size
        if reported is not None and node not in self._clients:  # anybody can say a number: it waits until that is sure
            self._claimed[node], reported = max(reported, self._claimed.get(node, 0.0)), None
        if client is None:
            if told and isinstance(question, PrivateQuestion):
                self._uncharged.setdefault(node, []).append((question.dp, question.charged_as, name))
            self._meter.came(None, size)
            self._unknown[node] += size
            return
        if told and isinstance(question, PrivateQuestion):
            self._spool.answered(node, ask)
            self._ledger.came(client, question.dp, question.charged_as, name, reported=reported)
        elif reported is not None:
            self._ledger.correct(client, reported, "releases that did not come")
        labels = answer.details.get("labels")
        cells = len(labels) if "sizes" in answer.details and isinstance(labels, list) else 0
        release = release_of(question, client, size_bytes=size, cells=cells, name=name) if told else None
        self._meter.came(client, size, release)

    def _client_of(self, node: int, answer: Answer) -> int | None:
        """Which client a node is: as is known, or else as it says now, unless another node is that client."""
        if node not in self._clients:
            with suppress(DataError):
                claimed = client_number(answer.details)
                return None if self._nodes.get(claimed, node) != node else claimed
        return self._clients.get(node)

    # --- who is asked

    def _all_nodes(self) -> list[int]:
        nodes = sorted(self._grid.get_node_ids())
        if not nodes:
            raise ContactError("No node is connected to the federation: there is nobody to ask.")
        return nodes

    def _greet(self) -> None:
        """Ask those who they are that nobody has met yet."""
        nodes, met = self._all_nodes(), set(self._nodes.values())
        strangers = [node for node in nodes if node not in met]
        ask = self._ask(WhoQuestion())
        found = self._messenger.wave(dict.fromkeys(strangers, ask), lambda node, answer: client_number(answer.details))
        self._enough(len(nodes), len(nodes) - len(strangers) + len(found))
        self._meet(found)

    def _meet(self, clients: Mapping[int, int]) -> None:
        """Learn which node is which client; a number that two nodes claim is an error."""
        connected = set(self._grid.get_node_ids())
        for node, client in clients.items():
            before = self._nodes.get(client, node)
            if before != node and (before in connected or before in clients):  # else it has come back by another number
                raise DataError(f"Two nodes say they are client {client}: {self._nodes[client]} and {node}.")
            if self._clients.get(node, client) != client:
                raise DataError(
                    f"Node {node} was client {self._clients[node]} before, and says now that it is {client}."
                )
            self._nodes[client], self._clients[node] = node, client
            self._meter.by_client[client] += self._unknown.pop(node, 0)
            for dp, charged_as, name in self._uncharged.pop(node, ()):
                self._ledger.came(client, dp, charged_as, name)
            if node in self._claimed:
                self._ledger.correct(client, self._claimed.pop(node), "releases that did not come")

    def _node_of(self, client: int) -> int:
        if client not in self.clients:
            raise ContactError(f"Client {client} has not answered so far: no node goes by that number.")
        return self._nodes[client]

    def _enough(self, asked: int, answered: int) -> None:
        if answered < max(1, self._least * asked * (1 - 1e-9)):  # 0.28 of 25 are 7, not a little more
            reasons = "; ".join(f"node {node}: {why}" for node, why in sorted(self.left_out.items()))
            raise ContactError(
                f"{answered} of {asked} nodes gave an answer of use, and least_fraction asks for {self._least:g}. "
                f"{reasons}. Ask again later, or with a smaller least_fraction."
            )


def _spent(answer: Answer) -> float | None:
    """The sum of μ² over all that the client has released, by its own account; None where it tells none of use."""
    told: Any = answer.details.get(messages.SPENT)
    is_number = isinstance(told, int | float) and not isinstance(told, bool)
    return float(told) if is_number and 0 <= told <= _LARGEST_SPENT else None
