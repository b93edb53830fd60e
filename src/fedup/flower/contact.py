"""The server's side: questions over a Flower Grid, and what is done with the answers."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flwr.serverapp import Grid
from torch import Tensor, nn

from fedup.clients.checks import client_number
from fedup.clients.intake import Intake, profile_of
from fedup.clients.labels import WhoQuestion
from fedup.clients.messages import TARGETS
from fedup.clients.model_facts import ModelFacts
from fedup.clients.profiles import Profiles
from fedup.clients.protocol import check_budgets, price_of
from fedup.clients.question import Question
from fedup.errors import ContactError, DataError, RequestError, SettingError
from fedup.files import explained
from fedup.flower.accounts import Accounts
from fedup.flower.answer_cache import AnswerCache
from fedup.flower.identity import Identities
from fedup.flower.messaging import Arrival, Delivery, Messenger
from fedup.flower.reached_nodes import ReachedNodes
from fedup.flower.wire import ROW, Answer, Ask, only_this_answer, row_of
from fedup.privacy.ledger import Ledger
from fedup.request import Forget, check_known

A = TypeVar("A")
_LOG = logging.getLogger(__name__)
_SPENT = "by its own account it has spent more than came here, and its budget"


class _InMemory(NamedTuple):
    """An answer that fits, and is not kept on disk."""

    client: int
    value: Any


_Taken = int | _InMemory  # of an answer on disk the client alone: there may be very many


def _client(taken: _Taken) -> int:
    """Whose answer it is."""
    return taken if isinstance(taken, int) else taken.client


class GridContact(ReachedNodes):
    """Clients behind a Flower Grid; `model` holds the trained weights, and `example` is one blank row of its inputs.

    `delivery` says how long the server waits for nodes, and how often it asks. A node that refuses, or whose answer
    does not fit, is left out; `left_out` says why.

    A release under differential privacy is charged to the `ledger` when it arrives, whatever becomes of the request,
    and only once. If a node has spent more by its own account, the ledger is corrected.

    With a `folder`, answers to a collection and releases for a request are kept there: a server that was killed asks
    only for what is missing. They are deleted when `settled` says that the result is stored, or by the next collection;
    `RunServer` takes care of this, and keeps answers in its run folder where the contact has no folder.

    Where the model has several labels for a row, or values, set `targets` before the first question ("labels",
    "values"); `num_classes` is the number of outputs then. Nodes are compared in rows and length only there.

    `declared_rows` may hold, by node, the rows that it said it trained on (`fedup.flower.declared_rows`): moments of
    more rows are refused.
    """

    near = False  # a question takes seconds

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        *,
        example: Tensor,
        num_classes: int,
        delivery: Delivery | None = None,
        folder: str | Path | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if num_classes < 1:
            raise SettingError(f"num_classes must be 1 or more; found {num_classes}.")
        self._row, self.num_classes = row_of(example[:1]), num_classes
        self._facts = ModelFacts(model, example, num_classes)
        self._delivery = delivery or Delivery()
        self._accounts = Accounts(grid, Ledger() if ledger is None else ledger)
        self.identities = Identities(grid)
        self._messenger = Messenger(grid, model, self._delivery, self._accounts.meter, self._arrived_together)
        self._cache = AnswerCache(folder, self._messenger.base)
        self.vectors_folder = None if folder is None else Path(folder)
        if self.vectors_folder is not None:
            with explained(f"make the folder {folder}"):
                self.vectors_folder.mkdir(parents=True, exist_ok=True)
        self.declared_rows: Mapping[int, int] = self._delivery.intake.declared_rows
        self._collected = False  # whether all answers to a collection were taken; they may still be on disk
        self._profiles = Profiles()  # by node, of its answer to the question under way
        self._compared = Profiles()  # the same of the last collection, to compare later answers with
        self._unmet: dict[int, str] = {}  # clients that were asked last and that no node goes by, and that in words
        self.flagged: dict[int, str] = {}  # nodes whose answers disagree with all others, and how

    @property
    def nodes(self) -> Mapping[int, int]:
        """The node of each client that answered so far; on first use all nodes are asked who they are."""
        _ = self.clients
        return dict(self._accounts.nodes)

    def meet_new_nodes(self) -> None:
        """Ask nodes that connected since the last question which client they are."""
        self._greet()

    def keep_answers(self, folder: Path) -> None:
        """Keep answers in this folder from now on, unless the contact has one."""
        if not self._cache.is_kept:
            self._cache = AnswerCache(folder, self._messenger.base)

    def settled(self, *, only_collection: bool = False) -> None:
        """Say that the results of all answers so far are stored: the answers are deleted, and the same question is a
        new one. With `only_collection` releases for requests stay: these may not be answered yet."""
        self._cache.settle(only_collection=only_collection)
        self._collected = False

    @property
    def clients(self) -> Sequence[int]:
        """All clients that answered so far; on first use all nodes are asked who they are. One that does not say so
        is not among them."""
        if not self._accounts.nodes:
            self._greet(everyone=False)
        return self._believed()

    def _believed(self) -> Sequence[int]:
        refused = self.flagged if self._delivery.intake.leaves_out else ()
        return sorted(client for client, node in self._accounts.nodes.items() if node not in refused)

    def check(self, request: Forget) -> None:
        check_known(request, clients=self.clients, num_classes=self.num_classes)
        if set(self.clients) <= request.client_ids:
            raise RequestError(f"To {request} leaves no training row. Take the model out of service instead.")

    def ask(self, questions: Mapping[int, Question[A]], *, optional: Collection[int] = ()) -> Iterator[tuple[int, A]]:
        connected = self._look_for(questions, optional)
        nodes = {client: self._accounts.nodes[client] for client in questions if client not in self._unmet}
        gone = self._messenger.no_reply - connected  # these would only be waited for once more
        by_node = {node: questions[client] for client, node in nodes.items() if node not in gone}
        self._profiles = Profiles()
        asks = self._asks(by_node)
        taken = self._ask_nodes(asks, {node: client for client, node in nodes.items()})
        taken = self._leave_out(taken, self._judge_later(by_node, taken))
        for client, node in nodes.items():
            if node not in taken and client not in optional:
                raise self.failure(client)
        return ((client, self._value(node, asks, taken)) for client, node in nodes.items() if node in taken)

    def ask_everyone(
        self, question: Question[A], *, instead: Mapping[int, Question[A]] | None = None, but: Collection[int] = ()
    ) -> Iterator[tuple[int, A]]:
        """Nodes are asked who they are first, if the question depends on it."""
        if self._collected:  # the answers on disk belong to the collection before
            self.settled(only_collection=True)
        if instead or but:
            self._greet()
            own = {client: (instead or {}).get(client, question) for client in self.clients if client not in but}
            questions = {self._accounts.nodes[client]: asked for client, asked in own.items()}
        else:
            questions = dict.fromkeys(self._accounts.connected(), question)
        self._profiles, self.flagged = Profiles(), {}
        asks = self._asks(questions)
        del questions  # there may be very many nodes
        taken = self._ask_nodes(asks, {})
        taken = self._leave_out(taken, self._meet({node: _client(answer) for node, answer in taken.items()}))
        self.flagged = self._judge(question, taken)
        taken = self._leave_out(taken, self.flagged if self._delivery.intake.leaves_out else {})
        self._compared = self._profiles.only(taken)
        lost = {node for client, node in self._accounts.nodes.items() if client not in but} - asks.keys()
        self._messenger.left_out |= dict.fromkeys(lost, "it is not connected any more")
        self._messenger.check_enough(len(taken), of=len(asks) + len(lost), asked=asks)
        return self._collection(asks, taken)

    def _look_for(self, clients: Collection[int], optional: Collection[int]) -> set[int]:
        """Find the nodes of these clients, also of those that came back; raises if one is not there and has to be.
        Returns all nodes that are connected."""
        connected: set[int] = set()
        if not clients:
            self._unmet = {}
            return connected
        with suppress(ContactError):  # nobody is connected at all
            known, nodes = self.clients, self._accounts.nodes
            connected = set(self._accounts.connected())
            lost = any(client not in known or nodes[client] not in connected for client in clients)
            if lost and connected - set(nodes.values()):
                self._greet(everyone=False)
        known = self._believed()
        self._unmet = {client: self._why_unmet(client) for client in clients if client not in known}
        for client in self._unmet:
            if client not in optional:
                raise ContactError(f"Client {client} has not answered so far: no node goes by that number.")
        return connected

    def _why_unmet(self, client: int) -> str:
        """Why no node goes by a number: perhaps one says that it is this client, and may not be."""
        claims = [why for node, why in self.left_out.items() if why.startswith(f"client {client} is bound")]
        return claims[0] if claims else "it has not answered so far: no node goes by that number"

    @property
    def _intake(self) -> Intake:
        return replace(self._delivery.intake, declared_rows=self.declared_rows)

    def _judge(self, question: Question[Any], taken: Mapping[int, _Taken]) -> dict[int, str]:
        """The nodes whose answers disagree with all others, and how."""
        flagged = self._intake.judge(self._profiles.only(taken), question, self._facts)
        for node, why in sorted(flagged.items()):
            _LOG.warning("node %d disagrees with all others: %s", node, why)
        return flagged

    def _judge_later(self, questions: Mapping[int, Question[Any]], taken: Mapping[int, _Taken]) -> dict[int, str]:
        """The nodes to leave out since answers after the collection disagree with what others sent then, or now."""
        reasons = self._intake.judge_later(self._profiles.only(taken), self._compared, questions, self._facts)
        self.flagged |= reasons
        return reasons if self._delivery.intake.leaves_out else {}

    def _leave_out(self, taken: dict[int, _Taken], reasons: Mapping[int, str]) -> dict[int, _Taken]:
        """The answers without those of nodes that are left out for these reasons."""
        self._messenger.leave_out(reasons)
        return {node: answer for node, answer in taken.items() if node not in reasons} if reasons else taken

    def _collection(self, asks: Mapping[int, Ask], taken: dict[int, _Taken]) -> Iterator[tuple[int, Any]]:
        waiting = sorted(taken, key=lambda node: _client(taken[node]), reverse=True)
        while waiting:  # an answer that was taken is freed
            node = waiting.pop()
            yield _client(taken[node]), self._value(node, asks, taken)
            del taken[node]
        self._collected = True

    def _asks(self, questions: Mapping[int, Question[Any]]) -> dict[int, Ask]:
        """What each node is asked: nodes with the same question share one object."""
        distinct = {id(question): question for question in questions.values()}
        asks_by_id = {key: self._ask(question) for key, question in distinct.items()}
        return {node: asks_by_id[id(question)] for node, question in questions.items()}

    def _ask_nodes(self, asks: Mapping[int, Ask], clients: Mapping[int, int]) -> dict[int, _Taken]:
        """The answers that fit, by node: some from disk, the others in one wave. `clients` says which client a node has
        to be, if that is known."""
        name_of, asked_before = self._cache.name(asks)
        taken = self._from_disk(asks, clients)
        for node in taken:
            self._messenger.left_out.pop(node, None)
        missing = {node: ask for node, ask in asks.items() if node not in taken} if taken else asks
        spent = self._check_budgets(missing, asked_before, bound=clients)
        missing = {node: ask for node, ask in missing.items() if node not in spent} if spent else missing
        try:
            taken |= self._messenger.wave(
                missing, lambda node, answer: self._take(node, asks[node], answer, clients.get(node)), name_of=name_of
            )
            return taken
        finally:
            self._messenger.leave_out(spent)
            self._cache.sync()

    def _ask(self, question: Question[Any]) -> Ask:
        details, arrays = question.to_message()
        if "half" in details:
            details["half"] = self._delivery.half
        details |= {"num_classes": self.num_classes, ROW: self._row}
        details |= {TARGETS: self.targets} if self.targets != "classes" else {}
        return Ask(question.kind, self._messenger.base, details, arrays=arrays, question=question)

    def _check_budgets(
        self, asks: Mapping[int, Ask], asked_before: Collection[int], *, bound: Collection[int]
    ) -> dict[int, str]:
        """Raise if a budget forbids a question. A release that was paid for and never arrived costs nothing.

        Returns the nodes, few and not `bound` to answer, that cannot afford it by their own word alone, and that in
        words: what one node says that it has spent must not end a collection.
        """
        if not self.ledger.budgets or not asks:
            return {}
        if not asks.keys() <= self._accounts.clients.keys():  # budgets belong to clients: first learn who the nodes are
            self._greet()
        questions, nodes = self._unpaid(asks, asked_before), self._accounts.nodes
        few = [nodes[client] for client, own in questions.items() if self._is_spent_by_its_word(client, own)]
        spent = {node: _SPENT for node in few if node not in bound}
        if len(spent) > self._intake.most_excused(len(asks)):  # then it is rather this server that knows too little
            spent = {}
        check_budgets(self.ledger, {c: own for c, own in questions.items() if nodes[c] not in spent})
        return spent

    def _unpaid(self, asks: Mapping[int, Ask], asked_before: Collection[int]) -> dict[int, Question[Any]]:
        """The questions, by client, but for releases that were made before, charged, and did not come."""
        nodes, uncovered = self._accounts.nodes, self.ledger.uncovered
        asked = [(client, asks[nodes[client]].question) for client in self.clients if nodes[client] in asks]
        return {
            client: own
            for client, own in asked
            if own and not (nodes[client] in asked_before and uncovered(client) >= price_of(own) * (1 - 1e-9))
        }

    def _is_spent_by_its_word(self, client: int, question: Question[Any]) -> bool:
        """Whether only what the client says, beyond what came, makes the question too dear."""
        price, affords = price_of(question), self.ledger.affords
        return affords(client, price - self.ledger.uncovered(client)) and not affords(client, price)

    def _arrived_together(self, arrivals: Sequence[Arrival]) -> None:
        """Count and charge answers before any of them is looked at: with a run folder in one event."""
        with self.ledger.together():
            for arrival in arrivals:
                self._arrived(arrival.node, arrival.ask, arrival.answer)

    def _arrived(self, node: int, ask: Ask, answer: Answer, *, counted: int | None = None) -> None:
        """Count and charge an answer before anything else: the node has done so, too."""
        assert ask.question is not None  # made here
        self.identities.note(node, answer)
        if self._accounts.book(node, ask.question, answer, counted=counted):
            self._cache.came(node, ask)

    def _take(self, node: int, ask: Ask, answer: Answer, expected: int | None) -> _Taken:
        """An answer that fits; with a folder, collections and releases wait there instead of in memory."""
        try:
            client, value = self._read(node, ask, answer, expected)
            self.identities.check(node, client)
        except DataError:  # by the same name the same release would come again
            self._cache.give_up(node, ask)
            raise
        with only_this_answer():  # details that cannot be written are as good as unreadable
            kept = self._cache.put(node, ask, answer)
        return client if kept else _InMemory(client, value)

    def _read(self, node: int, ask: Ask, answer: Answer, expected: int | None = None) -> tuple[int, Any]:
        """The client and its answer, checked; the profile of a node's answer is kept, if it is to be compared."""
        assert ask.question is not None  # made here
        client = client_number(answer.details)
        if expected not in (None, client):
            raise DataError(f"it was client {expected} before, and says now that it is {client}")
        with only_this_answer():
            value = ask.question.read(answer.details, answer.arrays, self._facts)
            profile = profile_of(ask.question, value, self._facts)
        if node in self.declared_rows:
            ask.question.check_rows(value, self.declared_rows[node])
        if profile is not None:
            self._profiles[node] = profile
        return client, value

    def _value(self, node: int, asks: Mapping[int, Ask], taken: Mapping[int, _Taken]) -> Any:
        """What an answer says, read from disk if it is there."""
        ask, own = asks[node], taken[node]
        if isinstance(own, _InMemory):
            return own.value
        answer = self._cache.get(node, ask)
        if answer is None:
            raise DataError(f"The answer of node {node} was deleted from the folder meanwhile. Collect again.")
        assert ask.question is not None  # made here
        with only_this_answer():
            return ask.question.read_again(answer.details, answer.arrays, self._facts)

    def _from_disk(self, asks: Mapping[int, Ask], clients: Mapping[int, int]) -> dict[int, _Taken]:
        """Cached answers; the node is asked again if one does not fit any more."""
        taken: dict[int, _Taken] = {}
        with self.ledger.together():
            for node, ask in asks.items():
                answer = self._cache.get(node, ask)
                with suppress(DataError):
                    if answer is not None:
                        client, _ = self._read(node, ask, answer, clients.get(node))
                        self.identities.check(node, client)
                        taken[node] = client
                        counted = 0 if self._cache.has_come(node, ask) else answer.size
                        self._arrived(node, ask, answer, counted=counted)
        return taken

    def _greet(self, *, everyone: bool = True) -> None:
        """Ask all unknown nodes which client they are; `everyone`: unless enough of them say so, that is an error."""
        nodes, met = self._accounts.connected(), set(self._accounts.nodes.values())
        strangers = [node for node in nodes if node not in met]
        ask = self._ask(WhoQuestion())
        clients = self._messenger.wave(dict.fromkeys(strangers, ask), self._client_of)
        reasons = self._meet(clients)
        if everyone or not self._accounts.nodes:
            here = len(nodes) - len(strangers) + len(clients) - len(reasons)
            self._messenger.check_enough(here, of=len(nodes), asked=strangers)

    def _client_of(self, node: int, answer: Answer) -> int:
        """The client that a node says it is, if it may."""
        client = client_number(answer.details)
        self.identities.check(node, client)
        return client

    def _meet(self, clients: Mapping[int, int]) -> dict[int, str]:
        """Note which client each node is; returns why some are not believed, and leaves them out."""
        with self.ledger.together():
            reasons = self._accounts.meet(clients)
        self._messenger.leave_out(reasons)
        self.identities.bind({node: client for node, client in clients.items() if node not in reasons})
        return reasons
