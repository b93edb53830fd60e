"""The second moments of what is retained, from those that are at hand: in several ways, so that nobody is needed.

Whichever way is taken, the integers are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedup.request import Forget
from fedup.statistics.client_parts import ClientPart
from fedup.statistics.store import Cell

if TYPE_CHECKING:
    from fedup.statistics.moment_store import MomentStore


@dataclass(frozen=True)
class Way:
    """Signed parts that add up to what is retained."""

    cells: tuple[tuple[int, Cell], ...]  # single cells, each with its sign
    classes: tuple[int, ...] = ()  # subtracted
    clients: tuple[int, ...] = ()  # subtracted from the total; or added to nothing
    added: bool = False

    def missing(self, store: "MomentStore") -> list[Cell]:
        """Cells whose second moments must be asked for."""
        return sorted({c for _, c in self.cells if c.name not in store.of_cells}, key=lambda cell: cell.name)

    def second(self, store: "MomentStore", parts: Mapping[int, ClientPart]) -> Tensor:
        """What is retained, once nothing is missing. `parts` have been read already."""
        second = store.total.second.new_zeros(store.total.second.shape) if self.added else store.total.second.clone()
        for client in self.clients:
            own = (parts[client] if client in parts else store.parts[client]).second
            assert own is not None  # ways() names no others
            second.add_(own, alpha=1 if self.added else -1)
        for label in self.classes:
            second -= store.of_classes[label]
        for sign, cell in self.cells:
            second += sign * store.of_cells[cell.name]
        return second


def ways(store: "MomentStore", forget_set: Forget) -> Iterator[Way]:
    """The cheapest way first: clients and classes are subtracted from the total.

    A cell of both is subtracted twice, and must be known by itself; where it is not, single cells of the class's other
    holders do as well. The last way adds up the clients that stay: whoever is absent is no part of it.
    """
    whole = tuple(sorted(client for client in forget_set.client_ids if store.parts.has_second(client)))
    summed = tuple(sorted(label for label in forget_set.class_ids if label in store.of_classes))
    usual = Way(tuple(_single_cells(store, forget_set, summed)), summed, whole)
    yield usual
    twice = {cell.label for sign, cell in usual.cells if sign > 0 and cell.name not in store.of_cells}
    if twice:
        rest = tuple(label for label in summed if label not in twice)
        yield Way(tuple(_single_cells(store, forget_set, rest)), rest, whole)
    staying = [client for client in store.clients if client not in forget_set.client_ids]
    sent = tuple(client for client in staying if store.parts.has_second(client))
    yield Way(tuple(_cells_staying(store, forget_set, staying)), (), sent, added=True)


def _single_cells(store: "MomentStore", forget_set: Forget, summed: tuple[int, ...]) -> Iterator[tuple[int, Cell]]:
    """Cells that count by themselves when clients and classes are left out, and with which sign: overlaps are
    subtracted twice, and cells of a client or class whose own second moments are unknown are not subtracted yet."""
    clients = forget_set.client_ids
    for label in forget_set.class_ids:
        known = label in summed
        for client in clients | store.unsent if known else store.clients:
            cell = store.cell((client, label))
            if cell is None or not int(store.counts[cell.start]):
                continue
            with_class = known and client not in store.unsent
            with_client = client in clients and store.parts.has_second(client)
            if with_class and with_client:
                yield 1, cell
            elif not with_class and not with_client:
                yield -1, cell
    for client in clients:
        for cell in () if store.parts.has_second(client) else store.cells_of(client):
            if cell.label not in forget_set.class_ids and int(store.counts[cell.start]):
                yield -1, cell


def _cells_staying(store: "MomentStore", forget_set: Forget, staying: list[int]) -> Iterator[tuple[int, Cell]]:
    """Cells to take from the clients that stay; of a client whose second moments are unknown, those to add."""
    for client in staying:
        known = store.parts.has_second(client)
        for cell in store.cells_of(client):
            if (cell.label in forget_set.class_ids) == known and int(store.counts[cell.start]):
                yield (-1 if known else 1), cell
