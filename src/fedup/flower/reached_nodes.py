"""What a server knows of the nodes that it asks: who they are, what they sent, and who gave no answer."""

from collections.abc import Collection, Mapping
from typing import Any

from fedup.clients.model_facts import ModelFacts
from fedup.errors import ContactError, FedUPError, check_choice
from fedup.flower.accounts import Accounts
from fedup.flower.identity import Identities
from fedup.flower.messaging import Messenger
from fedup.privacy.ledger import Ledger
from fedup.statistics.traffic import Traffic
from fedup.targets import Targets


class ReachedNodes:
    """The part of a contact that asks nothing."""

    _facts: ModelFacts
    _messenger: Messenger
    _accounts: Accounts
    _row: dict[str, Any]
    _unmet: dict[int, str]
    identities: Identities

    @property
    def targets(self) -> Targets:
        """What a row has: a class, or labels or values, where that was set."""
        return self._facts.targets

    @targets.setter
    def targets(self, targets: Targets) -> None:
        check_choice("targets", targets, Targets)
        self._facts.targets = targets

    @property
    def left_out(self) -> Mapping[int, str]:
        """Nodes without a usable answer, and why."""
        return self._messenger.left_out

    @property
    def silent(self) -> Mapping[int, str]:
        """`left_out` by client, and clients that no node goes by."""
        nodes = self._accounts.nodes
        known = {client: self.left_out[node] for client, node in nodes.items() if node in self.left_out}
        return self._unmet | known

    @property
    def absent(self) -> Collection[int]:
        """Clients that gave no reply to their last question, or that no node goes by."""
        nodes = self._accounts.nodes
        return {client for client, node in nodes.items() if node in self._messenger.no_reply} | self._unmet.keys()

    def failure(self, client: int) -> FedUPError:
        """Why a client that is there gave no answer to its last question, as an error."""
        return ContactError(f"Client {client} gave no answer of use: {self.silent[client]}. Nothing was changed.")

    @property
    def node_rules(self) -> Mapping[int, str]:
        """By client, what its node calls its own rules: a hash of their file, or "open" if it has none."""
        rules = self.identities.rules
        return {client: rules[node] for client, node in sorted(self._accounts.nodes.items()) if node in rules}

    @property
    def traffic(self) -> Traffic:
        """All messages so far, as serialised, with retries, weights and refusals."""
        return self._accounts.meter.traffic

    @property
    def ledger(self) -> Ledger:
        """What clients have spent, as far as the server knows; each node's own ledger decides."""
        return self._accounts.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._accounts.ledger = ledger

    @property
    def base(self) -> str:
        """Fingerprint of the model that nodes are asked about."""
        return self._messenger.base

    @property
    def row(self) -> dict[str, Any]:
        """Shape and type of one input row."""
        return self._row

    @property
    def connected(self) -> frozenset[int]:
        """The numbers of all nodes that are connected now."""
        return frozenset(self._accounts.grid.get_node_ids())
