"""Which node is which client, and what each has sent and spent."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from fedup.artifacts import digest_of
from fedup.clients.checks import client_number
from fedup.clients.labels import WhoQuestion
from fedup.clients.messages import SPENT
from fedup.clients.protocol import release_of
from fedup.clients.question import PrivateQuestion, Question
from fedup.errors import ContactError, DataError
from fedup.flower.wire import Answer
from fedup.privacy.ledger import Ledger
from fedup.statistics.traffic import Meter

_LARGEST_SPENT = 1e12  # μ²: a client that has released everything a million times
_LOST = "releases that did not come"


@dataclass(slots=True)
class _Stranger:
    """Answers of a node whose client is not known yet, and that does not say, or may not be, who it is."""

    bytes_up: int = 0
    releases: tuple[tuple[PrivateQuestion[Any, Any], str], ...] = ()  # and their names


_NOBODY = _Stranger()  # of whom nothing came


class Accounts:
    """Any node can claim any number: its claims count for a client only once it is known to be that client."""

    def __init__(self, grid: Grid, ledger: Ledger) -> None:
        self.grid, self.ledger, self.meter = grid, ledger, Meter()
        self.nodes: dict[int, int] = {}  # by client
        self.clients: dict[int, int] = {}  # by node
        self._strangers: defaultdict[int, _Stranger] = defaultdict(_Stranger)
        self._spent: dict[int, float] = {}  # μ², as nodes say whose client is not known yet

    def book(self, node: int, question: Question[Any], answer: Answer, *, counted: int | None = None) -> bool:
        """Count an answer and charge a release under DP; returns whether it holds data of a client.

        An answer from disk is `counted` with these bytes; what it says of the node's account is out of date.
        """
        holds = answer.status == "ok" and not isinstance(question, WhoQuestion)
        release = question if holds and isinstance(question, PrivateQuestion) else None
        name = digest_of("", answer.arrays.items()) if release else ""
        client, size = self._client_of(node, answer), answer.size if counted is None else counted
        spent = _spent(answer) if counted is None else None
        if spent is not None and node not in self.clients:
            self._spent[node], spent = max(spent, self._spent.get(node, 0.0)), None
        if client is None:
            if release:
                self._strangers[node].releases += ((release, name),)
            self._strangers[node].bytes_up += size
            self.meter.came(None, size)
            return False
        if release:
            self.ledger.came(client, release.dp, release.charged_as, name, reported=spent)
        elif spent is not None:
            self.ledger.correct(client, spent, _LOST)
        cells = question.cells_in(answer.details)
        reported = release_of(question, client, size_bytes=size, cells=cells, name=name) if holds else None
        self.meter.came(client, size, reported)
        return holds

    def _client_of(self, node: int, answer: Answer) -> int | None:
        """The client of a node: the known one, or else the one it claims now, unless another node has that number."""
        if node not in self.clients:
            with suppress(DataError):
                claimed = client_number(answer.details)
                return None if self.nodes.get(claimed, node) != node else claimed
        return self.clients.get(node)

    def connected(self) -> list[int]:
        """All nodes that are connected."""
        nodes = sorted(self.grid.get_node_ids())
        if not nodes:
            raise ContactError("No node is connected to the federation: there is nobody to ask.")
        return nodes

    def meet(self, clients: Mapping[int, int]) -> dict[int, str]:
        """Note which client each node is. Returns why, by node, where a node is not believed: its number belongs to
        another node, or two new nodes claim the same one, so that nobody knows whose it is."""
        connected, reasons = set(self.grid.get_node_ids()), dict[int, str]()
        first, claims = dict[int, int](), dict[int, list[int]]()  # by client; all nodes, where several say they are it
        for node, client in clients.items():
            if first.setdefault(client, node) != node:
                claims.setdefault(client, [first[client]]).append(node)
        for node, client in clients.items():
            nodes, known = claims.get(client, (node,)), self.nodes.get(client)
            if known is not None and known not in connected and known not in nodes:
                known = None  # it came back as another node
            if self.clients.get(node, client) != client:
                before = self.clients[node]
                reasons[node] = f"Node {node} was client {before} before, and says now that it is {client}."
            elif known not in (None, node) or (known is None and len(nodes) > 1):
                others = [known] if known is not None else [other for other in nodes if other != node]
                names = ", ".join(map(str, others))
                reasons[node] = f"Two nodes say they are client {client}: {names} and {node}."
        for node, client in clients.items():
            if node in reasons:
                continue
            self.nodes[client], self.clients[node] = node, client
            stranger = self._strangers.pop(node, _NOBODY)
            self.meter.by_client[client] += stranger.bytes_up
            for release, name in stranger.releases:
                self.ledger.came(client, release.dp, release.charged_as, name)
            self.ledger.correct(client, self._spent.pop(node, 0.0), _LOST)
        return reasons


def _spent(answer: Answer) -> float | None:
    """The sum of μ² of the client's releases by its own account; None without a usable number."""
    spent: Any = answer.details.get(SPENT)
    is_number = isinstance(spent, int | float) and not isinstance(spent, bool)
    return float(spent) if is_number and 0 <= spent <= _LARGEST_SPENT else None
