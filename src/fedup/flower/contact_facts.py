"""What a contact over a grid knows of its nodes: who they are, what they sent, and who gave no answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedup.errors import ContactError, FedUPError
from fedup.flower.accounts import Accounts
from fedup.flower.identity import Identities
from fedup.flower.messaging import Messenger
from fedup.privacy.ledger import Ledger
from fedup.statistics.traffic import Traffic


class ContactFacts:
    """The part of `GridContact` that asks nobody."""

    identities: Identities
    _accounts: Accounts
    _messenger: Messenger
    _row: dict[str, Any]
    _unmet: dict[int, str]  # clients that were asked last and that no node goes by, and that in words

    @property
    def clients(self) -> Sequence[int]:
        """All clients that answered so far."""
        raise NotImplementedError

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
    def nodes(self) -> Mapping[int, int]:
        """The node of each client that answered so far; on first use all nodes are asked who they are."""
        _ = self.clients
        return dict(self._accounts.nodes)

    @property
    def connected(self) -> frozenset[int]:
        """The numbers of all nodes that are connected now."""
        return frozenset(self._accounts.grid.get_node_ids())
