"""The server's side: the questions of `fedup.contact.Contact`, asked over a Flower Grid."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedup import messages
from fedup.centroids import how_from
from fedup.client import Summarizing, Summary
from fedup.contact import Asked, release_of
from fedup.cut import read_features
from fedup.eraser_statistics import GroupSpreads, Question, Sketches, Weights, shortened
from fedup.errors import ContactError, DataError, RequestError, SettingError
from fedup.flower import reading
from fedup.flower.messaging import Messenger
from fedup.flower.spool import Spool, question_of
from fedup.flower.wire import NONCE, ROW, Answer, Ask, row_of
from fedup.moments import Moments
from fedup.plugging import Served
from fedup.positions import Over, to_positions
from fedup.privacy.dp import Layout
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.privacy.projection import basis_of
from fedup.private_erasure import NoisyStatistics
from fedup.request import Forget, check_known
from fedup.tally import Tally, TallyQuestion
from fedup.taps import Taps
from fedup.traffic import Meter, Traffic

MOST_BYTES = 16_000_000  # of one answer
_SPARED = ("sketch", "tally")  # a request may go on without one client's answer to these: the others' still wait
T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting:
    """A client's answer to a collection, until it is taken into the store."""

    client: int
    rows: Mapping[int, int]
    asked: tuple[
        str, Summarizing | DP, frozenset[int], frozenset[int]
    ]  # cut, how, which classes, without which samples
    load: Callable[[], Summary]


class GridContact:
    """Clients behind a Flower Grid; `model` holds the trained weights, and `example` is one blank row of its inputs.

    A node that does not answer within `timeout` seconds is asked again, `retries` times, after longer and longer
    pauses; one that refuses, or whose answer does not fit, is left out, and `left_out` says why. Fewer than
    `least_fraction` of the nodes is an error.

    A release under differential privacy is charged to the `ledger` the moment it comes, whatever becomes of the
    request, and once, whatever it is called; where a node has spent more by its own account, the ledger is corrected.

    With a `folder` answers to a collection, and releases for a request, are kept there as they come: a server that was
    killed asks only for what is missing. They go once `settled` says that what was made of them is stored, or with the
    next collection; `RunMemory` sees to it.

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
        self._grid, self._model, self._example, self._classes = grid, model, example[:1], num_classes
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
        self._unknown: Counter[int] = Counter()  # by node that has not said who it is: bytes that came from it
        self._labels: dict[int, dict[int, int]] = {}  # by client: classes of samples, as told
        self._known: dict[tuple[str, Summarizing | DP], tuple[tuple[int, ...], bool, int]] = {}
        self._rows: dict[int, Mapping[int, int]] = {}  # by client: rows of each class, as told at collection
        self._early: dict[tuple[int, str], Answer | str] = {}  # by node and question; why, where nothing of use came
        self._ready: dict[int, _Waiting] = {}  # by client: answers to a collection, not taken yet
        self._complete = False  # whether a collection has taken all of its answers, which may still be on disk

    @property
    def left_out(self) -> Mapping[int, str]:
        """Nodes that gave no answer of use, and why."""
        return self._messenger.left_out

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

    def settled(self, *, only_collection: bool = False) -> None:
        """What was made of the answers so far is stored: none stays on disk, and to ask again is to ask anew. With
        `only_collection` releases for a request stay, which may not have been answered yet."""
        self._spool.settle(only_collection=only_collection)
        self._complete = False

    @property
    def clients(self) -> Sequence[int]:
        """All that answered so far; on first use they are asked who they are."""
        if not self._nodes:
            self._greet()
        return sorted(self._nodes)

    def _greet(self) -> None:
        """Ask those who they are that nobody has met yet."""
        nodes, met = self._all_nodes(), set(self._nodes.values())
        strangers = [node for node in nodes if node not in met]
        asks = dict.fromkeys(strangers, self._ask("who"))
        found = self._messenger.wave(asks, lambda node, answer: reading.client_of(answer))
        self._enough(len(nodes), len(nodes) - len(strangers) + len(found))
        self._meet(found)

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

    def check(self, request: Forget) -> None:
        check_known(request, clients=self.clients, num_classes=self._classes)
        if set(self.clients) <= request.client_ids:
            raise RequestError(f"To {request} leaves no training row. Take the model out of service instead.")

    def reach(self, *, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> Sequence[int]:
        """One wave for all, whose answers then wait for `summarize`; the clients that answered."""
        self._ready, self._early = {}, {}  # what waits is of a collection, or of a request, that was given up
        if self._complete:  # what is on disk is of the collection before
            self.settled(only_collection=True)
        if not isinstance(how, DP):  # under a guarantee nobody is asked of which class a sample is
            if self._ledger.budgets:
                self._ledger.check_exact([client for client in self.clients if client not in gone.client_ids])
            for client, samples in gone.sample_ids.items():
                self.labels_of(client, samples)  # raises where one is unknown
        asks = self._asks_for_all(cut, how, gone, without)
        asked_before, asks = self._spool.asked_before(asks), self._named(asks)
        clients = {node: client for client, node in self._nodes.items()}
        expected = {node: self._expected(cut, how, ask, clients.get(node)) for node, ask in asks.items()}
        found = self._kept(asks, lambda node, answer: self._take(node, asks[node], answer, expected[node], kept=True))
        left = {node: ask for node, ask in asks.items() if node not in found}
        if isinstance(how, DP) and self._ledger.budgets and left:  # what may not be had is not asked for
            asked = [client for client in self.clients if self._nodes[client] in left]
            paid = {client for client in asked if self._ledger.uncovered(client) >= how.mu**2 * (1 - 1e-9)}
            self._ledger.check([one for one in asked if one not in paid or self._nodes[one] not in asked_before], how)
        found |= self._wave(left, lambda node, answer: self._take(node, asks[node], answer, expected[node]))
        self._meet({node: waiting.client for node, waiting in found.items()})
        self._enough(len(asks) + len(self._note_lost(asks, gone)), len(found))
        self._ready = {waiting.client: waiting for waiting in found.values()}
        self._rows |= {waiting.client: waiting.rows for waiting in found.values()}
        return sorted(self._ready)

    def _take(
        self, node: int, ask: Ask, answer: Answer, expected: reading.Expected, *, kept: bool = False
    ) -> "_Waiting":
        """A summary that fits; where there is a folder it waits there, and not in memory."""
        told = reading.told_of(answer, expected)  # raises before anything is written
        summary = None if kept or self._spool.put(node, ask, answer) else told.summary
        asked = ask.details["cut"], expected.how, frozenset(told.summary.labels), expected.excluded
        load = partial(self._again, node, ask, expected) if summary is None else lambda: summary
        return _Waiting(told.summary.client, told.rows, asked, load)

    def _again(self, node: int, ask: Ask, expected: reading.Expected) -> Summary:
        answer = self._spool.get(node, ask)
        if answer is None:
            raise DataError(f"The answer of node {node} was taken away from the folder meanwhile. Collect again.")
        return reading.told_of(answer, expected).summary

    def cell_sizes(self, clients: Sequence[int]) -> dict[int, dict[int, int]]:
        return {client: dict(self._rows[client]) for client in clients}

    def labels_of(self, client: int, samples: frozenset[int]) -> dict[int, int]:
        known = self._labels.setdefault(client, {})
        if not samples <= known.keys():
            read = partial(reading.labels_of, samples=samples, num_classes=self._classes)
            known |= self._one(client, self._labels_ask(samples), read)
        return {sample: known[sample] for sample in samples}

    def summarize(
        self,
        client: int,
        *,
        cut: str,
        how: Summarizing | DP,
        labels: frozenset[int],
        excluded: frozenset[int],
        out: Tensor | None = None,
    ) -> Summary:
        waiting = self._ready.pop(client, None)
        if waiting is not None and waiting.asked == (cut, how, labels, excluded):
            summary = waiting.load()
            self._complete = not any(other.asked[2] for other in self._ready.values())  # all that have cells are taken
        else:  # what waits answers another question: a collection that was given up
            ask = self._cells_ask(cut, how, labels, excluded)
            expected = self._expected(cut, how, ask, client)
            summary = self._one(client, ask, lambda answer: reading.told_of(answer, expected).summary)
        if summary.client != client or set(summary.labels) != labels:  # a cell left out would stay as it was
            raise DataError(f"Client {client} answered for another client, or for other classes than it was asked for.")
        return summary

    def sketch_groups(self, client: int, *, cut: str, over: Over, question: Question) -> Sketches:
        shape = shortened(torch.zeros(self._spreads({cut: over})[cut])).shape
        read = partial(
            reading.sketches_of,
            shape=(shape[0], shape[1]),
            names=set(question.requests),
            num_classes=self._classes,
        )
        return self._one(client, self._sketch_ask(cut, over, question), read)

    def measure_groups(
        self, client: int, *, cuts: Mapping[str, Over], question: Question, weights: Weights
    ) -> GroupSpreads:
        shares = {name: sum(of.values()) for name, of in weights.items()}
        read = partial(reading.spreads_of, spreads=self._spreads(cuts), names=set(question.requests), shares=shares)
        return self._one(client, self._spreads_ask(cuts, question, weights), read)

    def second_moments(
        self, client: int, *, cut: str, over: Over, positions: Sequence[int], question: Question
    ) -> Moments | None:
        spread = len(positions), self._spreads({cut: over})[cut][1]
        ask = self._moments_ask(cut, over, positions, question)
        return self._one(client, ask, partial(reading.moments_of, spread=spread))

    def tally(self, client: int, *, before: Served | None, after: Served | None, question: TallyQuestion) -> Tally:
        read = partial(reading.tally_of, names=set(question.requests), num_classes=self._classes)
        return self._one(client, self._tally_ask(before, after, question), read)

    @property
    def measures_by_default(self) -> bool:
        """Each question is a message of seconds: client and class requests are answered without any."""
        return False

    def gather_privately(self, client: int, *, cut: str, dp: DP, question: Question) -> NoisyStatistics:
        places, channels = self._spreads({cut: "each"})[cut]
        read = partial(reading.noisy_of, spread=(places, channels), num_classes=self._classes)
        return self._one(client, self._private_ask(cut, dp, question), read)

    def ahead(self, question: Asked, of: Mapping[int, Mapping[str, Any]]) -> None:
        """One wave for all of these clients; their answers wait until the question is asked of each."""
        self._early = {}
        if question == "labels_of":
            of = {
                client: one for client, one in of.items() if not one["samples"] <= self._labels.get(client, {}).keys()
            }
        if len(of) < 2:  # it will be asked soon enough
            return
        write: Mapping[Asked, Callable[..., Ask]] = {
            "labels_of": self._labels_ask,
            "summarize": self._cells_ask,
            "sketch_groups": self._sketch_ask,
            "measure_groups": self._spreads_ask,
            "second_moments": self._moments_ask,
            "tally": self._tally_ask,
            "gather_privately": self._private_ask,
        }
        asks = self._named({self._node_of(client): write[question](**arguments) for client, arguments in of.items()})
        found = self._kept(self._releases(asks), lambda node, answer: answer)
        left = {node: ask for node, ask in asks.items() if node not in found}
        found |= self._wave(left, lambda node, answer: self._keep(node, asks[node], answer))
        self._early = {
            (node, question_of(ask)): found.get(node, self.left_out.get(node, "")) for node, ask in asks.items()
        }

    # --- what comes

    def _arrived(self, node: int, ask: Ask, answer: Answer, *, size: int | None = None) -> None:
        """Count an answer and, if it is a release under DP, charge it: before anything else, since the node has. One
        that is read from disk counts with another `size`; what it says of the node's account is old."""
        how = _how_of(ask)
        told = answer.status == "ok" and ask.kind != "who"
        name = messages.identity_of(answer.arrays) if told and isinstance(how, DP) else ""
        client, reported = self._client_of(node, answer), reading.spent_of(answer) if size is None else None
        size = answer.size if size is None else size
        if client is None:
            self._meter.came(None, size)
            self._unknown[node] += size
            return
        if told and isinstance(how, DP):
            self._spool.answered(node, ask)
            self._ledger.came(client, how, messages.CHARGED_AS.get(ask.kind, ask.kind), name, reported=reported)
        elif reported is not None:
            self._ledger.correct(client, reported, "releases that did not come")
        labels = answer.details.get("labels")
        cells = len(labels) if ask.kind == "summarize" and isinstance(labels, list) else 0
        release = release_of(client, ask.kind, size, how=how, name=name, cells=cells) if told else None
        self._meter.came(client, size, release)

    def _client_of(self, node: int, answer: Answer) -> int | None:
        """Which client a node is: as is known, or else as it says now."""
        if node not in self._clients:
            with suppress(DataError):
                return reading.client_of(answer)
        return self._clients.get(node)

    def _named(self, asks: Mapping[int, Ask]) -> dict[int, Ask]:
        """The same questions; those for a release under DP by the name that they have until they are settled."""
        names = self._spool.name(self._releases(asks))
        return {
            node: replace(ask, details={**ask.details, NONCE: names[node]}) if node in names else ask
            for node, ask in asks.items()
        }

    def _releases(self, asks: Mapping[int, Ask]) -> dict[int, Ask]:
        return {node: ask for node, ask in asks.items() if isinstance(_how_of(ask), DP)}

    def _kept(self, asks: Mapping[int, Ask], read: Callable[[int, Answer], T]) -> dict[int, T]:
        """What is on disk of these answers; one that does not fit any more is asked for again."""
        found = {}
        for node, ask in asks.items():
            answer = self._spool.get(node, ask)
            with suppress(DataError):
                if answer is not None:
                    found[node] = read(node, answer)
                    self._arrived(node, ask, answer, size=answer.size if self._spool.came_before(node, ask) else 0)
        return found

    def _keep(self, node: int, ask: Ask, answer: Answer) -> Answer:
        """A release is kept on disk until what is made of it is stored; an exact answer is not."""
        if isinstance(_how_of(ask), DP):
            self._spool.put(node, ask, answer)
        return answer

    def _wave(self, asks: Mapping[int, Ask], read: Callable[[int, Answer], T]) -> dict[int, T]:
        return self._messenger.wave(asks, lambda node, answer: self._fitting(node, asks[node], answer, read))

    def _fitting(self, node: int, ask: Ask, answer: Answer, read: Callable[[int, Answer], T]) -> T:
        try:
            return read(node, answer)
        except DataError:  # it was released and charged: by the same name it would come again
            self._spool.give_up(node, ask)
            raise

    # --- what is asked

    def _labels_ask(self, samples: frozenset[int]) -> Ask:
        return self._ask("labels", messages.labels_question(samples))

    def _cells_ask(self, cut: str, how: Summarizing | DP, labels: frozenset[int], excluded: frozenset[int]) -> Ask:
        return self._summary_ask(cut, how, labels, frozenset(), excluded)

    def _sketch_ask(self, cut: str, over: Over, question: Question) -> Ask:
        return self._ask("sketch", messages.sketch_question(cut, over, question))

    def _spreads_ask(self, cuts: Mapping[str, Over], question: Question, weights: Weights) -> Ask:
        return self._ask("spreads", messages.spreads_question(cuts, question, weights))

    def _moments_ask(self, cut: str, over: Over, positions: Sequence[int], question: Question) -> Ask:
        return self._ask("moments", messages.moments_question(cut, over, positions, question))

    def _tally_ask(self, before: Served | None, after: Served | None, question: TallyQuestion) -> Ask:
        details, arrays = messages.tally_question(before, after, question)
        return replace(self._ask("tally", details), arrays=arrays)

    def _private_ask(self, cut: str, dp: DP, question: Question) -> Ask:
        return self._ask("gather privately", messages.private_question(cut, dp, question))

    def _ask(self, kind: str, details: Mapping[str, Any] | None = None) -> Ask:
        told = {**(details or {}), "num_classes": self._classes, ROW: row_of(self._example)}
        return Ask(kind, self._messenger.base, told)

    def _summary_ask(
        self,
        cut: str,
        how: Summarizing | DP,
        labels: frozenset[int] | None,
        without: frozenset[int],
        excluded: frozenset[int],
    ) -> Ask:
        """For some classes, or for all that a client holds without these."""
        half = self._half
        details = messages.summary_question(cut, how, labels, without=without, excluded=excluded, half=half)
        return self._ask("summarize", details)

    def _asks_for_all(self, cut: str, how: Summarizing | DP, gone: Forget, without: frozenset[int]) -> dict[int, Ask]:
        """By node. Where a request names clients or samples, each node gets what concerns it, and no other's."""
        if not gone.client_ids and not gone.sample_ids:
            return dict.fromkeys(self._all_nodes(), self._summary_ask(cut, how, None, without, frozenset()))
        self._greet()
        asked = [client for client in self.clients if client not in gone.client_ids]
        usual = self._summary_ask(cut, how, None, without, frozenset())  # one object for all that get the same
        return {
            self._nodes[client]: self._summary_ask(cut, how, None, without, gone.sample_ids[client])
            if client in gone.sample_ids
            else usual
            for client in asked
        }

    def _expected(self, cut: str, how: Summarizing | DP, ask: Ask, client: int | None) -> reading.Expected:
        """What a node must say to this question."""
        shape, nonnegative, width = self._features(cut, how)
        asked, excluded = ask.details["labels"], frozenset(ask.details["excluded"])
        known = {} if client is None else self._labels.get(client, {})
        return reading.Expected(
            how,
            shape,
            width,
            nonnegative,
            self._classes,
            labels=None if asked is None else frozenset(asked),
            without=frozenset(ask.details["without"]),
            excluded=excluded,
            classes={sample: known[sample] for sample in excluded if sample in known},
        )

    def _features(self, cut: str, how: Summarizing | DP) -> tuple[tuple[int, ...], bool, int]:
        """Shape and kind of a row's features at a cut, and the numbers in a vector that tells of them."""
        if (cut, how) not in self._known:
            found = read_features(self._model, cut, self._example, torch.arange(1, device=self._example.device))
            width, nonnegative = math.prod(found.shape), found.nonnegative
            if isinstance(how, DP):
                basis = basis_of(self._model, cut, width, how=how.projection, dims=how.dims, num_classes=self._classes)
                width, nonnegative = Layout.of(how, basis.shape[1], self._classes).size, False
            self._known[cut, how] = found.shape, nonnegative, width
        return self._known[cut, how]

    def _spreads(self, cuts: Mapping[str, Over]) -> dict[str, tuple[int, int]]:
        """Positions and channels at each cut."""
        (batch,) = Taps(self._model, list(cuts)).read(self._example, torch.arange(1, device=self._example.device))
        shapes = {cut: to_positions(batch[cut], over).shape for cut, over in cuts.items()}
        return {cut: (shape[1], shape[2]) for cut, shape in shapes.items()}

    # --- who is asked

    def _all_nodes(self) -> list[int]:
        nodes = sorted(self._grid.get_node_ids())
        if not nodes:
            raise ContactError("No node is connected to the federation: there is nobody to ask.")
        return nodes

    def _note_lost(self, asked: Collection[int], gone: Forget) -> set[int]:
        """Nodes that were here once and are not even to be asked now: they are missing, too."""
        lost = {node for client, node in self._nodes.items() if client not in gone.client_ids} - set(asked)
        self._messenger.left_out |= dict.fromkeys(lost, "it is not connected any more")
        return lost

    def _meet(self, clients: Mapping[int, int]) -> None:
        """Learn which node is which client; a number that two nodes claim is an error."""
        known, connected = {node: client for client, node in self._nodes.items()}, set(self._grid.get_node_ids())
        for node, client in clients.items():
            before = self._nodes.get(client, node)
            if before != node and (before in connected or before in clients):  # else it has come back by another number
                raise DataError(f"Two nodes say they are client {client}: {self._nodes[client]} and {node}.")
            if known.get(node, client) != client:
                raise DataError(f"Node {node} was client {known[node]} before, and says now that it is {client}.")
            self._nodes[client], self._clients[node] = node, client
            self._meter.by_client[client] += self._unknown.pop(node, 0)

    def _one(self, client: int, ask: Ask, read: Callable[[Answer], T]) -> T:
        node = self._node_of(client)
        ask = self._named({node: ask})[node]
        early = self._early.pop((node, question_of(ask)), None)
        if isinstance(early, Answer):
            try:
                return self._fitting(node, ask, early, lambda node, answer: read(answer))
            except DataError as error:
                early = self._messenger.left_out[node] = str(error)
        if early is None:
            found = self._kept(self._releases({node: ask}), lambda node, answer: read(answer))
            found = found or self._wave({node: ask}, lambda node, answer: read(self._keep(node, ask, answer)))
            if node in found:
                return found[node]
            early = self.left_out[node]
        if ask.kind not in _SPARED:
            self._early = {}  # the request is given up: whoever asks next asks anew
        raise ContactError(f"Client {client} gave no answer of use: {early}. Nothing was changed.")

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


def _how_of(ask: Ask) -> Summarizing | DP | None:
    """How the answer is to be made, where a question says so."""
    return how_from(ask.details["how"]) if "how" in ask.details else None
