"""Which node a client number belongs to: noted in the run folder when a client is first met, and kept since."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from fedup.errors import DataError, RequestError
from fedup.run.folder import Writer
from fedup.run.state import State

By = Literal["key", "node id"]
RULES_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Binding:
    """A client and its node: by the hash of the node's public key, or by its number at the SuperLink, which is weaker:
    a node that restarts may get a new one, and any node can come first. `rules` is what the node calls its rules."""

    client: int
    by: By
    identity: str
    rules: str = RULES_UNKNOWN


def bindings_of(state: State) -> dict[int, Binding]:
    """The bindings in a run folder, by client."""
    bound: dict[int, Binding] = {}
    for event in state.events:
        if event.kind == "bound":
            bound |= {own["client"]: Binding(**own) for own in event.body["bindings"]}
        if event.kind == "released":
            bound = {client: own for client, own in bound.items() if client not in event.body["clients"]}
    return bound


class RunBindings:
    """The bindings for the one writer of a folder."""

    def __init__(self, writer: Writer, *, by: By) -> None:
        self._writer, self.by = writer, by
        self._bound = bindings_of(writer.state)
        self._clients = {own.identity: client for client, own in self._bound.items()}

    def check(self, client: int, identity: str | None) -> None:
        """Raise unless the node with this identity may answer as that client."""
        if identity is None:
            raise DataError("it has no key, and this server accepts nodes with keys only")
        own = self._bound.get(client)
        if own is not None and (own.by, own.identity) != (self.by, identity):
            lost = " (a node without a key gets a new one whenever it starts)" if own.by == "node id" else ""
            raise DataError(
                f"client {client} is bound to another {own.by} in this run folder{lost}; if it is the same client, "
                f"release the number with `fedup release {client}` or RunServer.release({client})"
            )
        if self._clients.get(identity, client) != client:
            raise DataError(f"it was client {self._clients[identity]} before, and says now that it is {client}")

    def bind(self, bindings: Iterable[Binding]) -> None:
        """Note new clients, and known ones whose rules have changed."""
        new = [own for own in bindings if own != self._bound.get(own.client)]
        if new:
            self._writer.commit("bound", {"bindings": [asdict(own) for own in new]})
            self._bound |= {own.client: own for own in new}
            self._clients |= {own.identity: own.client for own in new}


def release(writer: Writer, clients: Iterable[int]) -> None:
    """Free the numbers of clients, so that another node can take them; noted in the journal."""
    wanted, bound = sorted(set(clients)), bindings_of(writer.state)
    unknown = [client for client in wanted if client not in bound]
    if unknown:
        raise RequestError(f"Client {unknown[0]} is bound to no node in this run folder. Nothing was changed.")
    writer.commit("released", {"clients": wanted})


def describe_bindings(state: State) -> list[dict[str, object]]:
    """Plain data, for `fedup status`."""
    return [asdict(own) for _, own in sorted(bindings_of(state).items())]
