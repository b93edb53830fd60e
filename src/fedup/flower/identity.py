"""Whose answer it is: nodes by their keys, as Flower's SuperLink has checked them, and client numbers bound to them."""

import hashlib
import logging
from collections.abc import Mapping
from sys import intern

from flwr.serverapp import Grid

from fedup.clients.messages import RULES
from fedup.flower.rules import is_open
from fedup.flower.wire import Answer
from fedup.run.bindings import RULES_UNKNOWN, Binding, RunBindings

_LONGEST_LABEL = 32
_LOG = logging.getLogger(__name__)


class Identities:
    """The nodes of a grid. Without `bindings` (no run folder) a number is only bound as long as the contact lives."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.bindings: RunBindings | None = None
        self._keys: dict[int, str] = {}  # by node: hash of its public key
        self.rules: dict[int, str] = {}  # by node: what it calls its own rules
        self._announced: set[int] = set()  # open nodes that the log has named

    def note(self, node: int, answer: Answer) -> None:
        """Note what an answer says of the node's rules."""
        label = answer.details.get(RULES)
        if answer.status == "ok":
            fits = isinstance(label, str) and len(label) <= _LONGEST_LABEL and label.isprintable()
            self.rules[node] = intern(str(label)) if fits else RULES_UNKNOWN  # most nodes have the same

    def check(self, node: int, client: int) -> None:
        """Raise DataError if the node may not answer as that client: its answer alone is left out."""
        if self.bindings is not None:
            self.bindings.check(client, self._identity(node))

    def bind(self, clients: Mapping[int, int]) -> None:
        """Note in the run folder which client each node is; the log says how many nodes have no rules."""
        openly = [node for node in clients if is_open(self.rules.get(node, ""))]
        if not self._announced.issuperset(openly):
            _LOG.warning("%d of %d nodes are open: they answer without rules of their own", len(openly), len(clients))
            self._announced.update(openly)
        if self.bindings is None:
            return
        by, nodes = self.bindings.by, sorted(clients, key=clients.__getitem__)
        self.bindings.bind(
            Binding(clients[node], by, str(self._identity(node)), self.rules.get(node, RULES_UNKNOWN)) for node in nodes
        )

    def _identity(self, node: int) -> str | None:
        assert self.bindings is not None
        if self.bindings.by == "node id":
            return str(node)
        if node not in self._keys:
            keys = {info.node_id: info.public_key for info in self._grid.get_nodes()}
            self._keys |= {number: hashlib.sha256(key).hexdigest() for number, key in keys.items() if key}
        return self._keys.get(node)
