"""A store of moments that grows: clients and rows that come later, by the same sums with a plus."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedup.errors import DataError
from fedup.statistics.cell_table import CellTable
from fedup.statistics.client_parts import ClientPart
from fedup.statistics.integer_moments import IntegerMoments
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName


def add_client(store: MomentStore, client: int, moments: IntegerMoments, by_class: Mapping[int, Tensor]) -> None:
    """Add a client's moments to the totals; `by_class` are its second moments of single classes, if it sent them."""
    if client in store.known_clients:
        raise DataError(f"Client {client} is here already: add its new rows by their ids.")
    if moments.width != store.total.width or len(moments.counts) != len(store.total.counts):
        raise DataError(f"Client {client} sent moments of another width or label set than the totals.")
    total = store.total + moments
    total.check(store.config)
    unheld = store.total.counts == 0
    labels = moments.held
    insert_cells(store, [(client, label) for label in labels])
    store.clients = tuple(sorted((*store.clients, client)))
    store.__dict__.pop("known_clients", None)
    if labels:
        store.parts[client] = ClientPart(moments.sums[labels], moments.second)
    store.total = total
    for cell in store.cells_of(client):
        store.counts[cell.start] = store.sizes[cell.start] = moments.counts[cell.label]
        if cell.label in by_class and (cell.label in store.of_classes or bool(unheld[cell.label])):
            store.of_classes[cell.label] = store.of_classes.get(cell.label, 0) + by_class[cell.label]
    if labels and not by_class:
        store.unsent.add(client)


def add_rows(store: MomentStore, client: int, moments: IntegerMoments, by_class: Mapping[int, Tensor]) -> None:
    """Add the moments of new rows to cells that are there."""
    for cell in store.cells_of(client):
        if not int(moments.counts[cell.label]):
            continue
        store.change(cell, moments, by_class[cell.label])
        if cell.name in store.sealed:  # the original has the new rows, too
            sums, counts = store.sealed[cell.name]
            store.sealed[cell.name] = sums + moments.sums[cell.label], counts + moments.counts[cell.label]


def insert_cells(store: MomentStore, names: Iterable[CellName]) -> None:
    """Make empty cells where there are none."""
    clients, labels = store.cell_columns
    known = list(zip(clients, labels, strict=True))
    fresh = set(names) - set(known)
    if not fresh:
        return
    merged = sorted((*known, *fresh))
    at = {name: place for place, name in enumerate(merged)}
    places = torch.tensor([at[name] for name in known], dtype=torch.int64)
    counts, sizes = (torch.zeros(len(merged), dtype=torch.int64) for _ in range(2))
    counts[places], sizes[places] = store.counts, store.sizes
    grown = []
    for client in sorted({client for client, _ in fresh} & set(store.parts)):
        part, before = store.parts[client], [label for holder, label in known if holder == client]
        now = [label for holder, label in merged if holder == client]
        sums = torch.zeros(len(now), store.total.width, dtype=torch.int64)
        sums[[now.index(label) for label in before]] = part.sums
        grown.append((client, ClientPart(sums, part.second)))
    for client in {client for client, _ in fresh} & store.known_clients - set(store.parts):
        if any(client == holder and int(store.counts[place]) for place, (holder, _) in enumerate(known)):
            raise DataError(f"The sums of client {client} are missing: the store is damaged.")
    store.parts.replace_all(grown)
    store.cells = CellTable((client for client, _ in merged), (label for _, label in merged))
    store.counts, store.sizes = counts, sizes
    store.__post_init__()


def drop_client(store: MomentStore, client: int) -> None:
    """Take all that a client sent out of the store, as if it had not been there.

    Second moments of its classes cannot be told apart from what it sent: where they are not known by themselves, other
    clients are asked for theirs when a class is forgotten.
    """
    cells = store.cells_of(client)
    store.total = store.all_but(client)
    for cell in cells:
        known = store.of_cells.pop(cell.name, None)
        if cell.label in store.of_classes and client not in store.unsent and int(store.counts[cell.start]):
            if known is None:
                del store.of_classes[cell.label]
            else:
                store.of_classes[cell.label] = store.of_classes[cell.label] - known
    staying = [i for i, holder in enumerate(store.cell_columns[0]) if holder != client]
    if client in store.parts:
        del store.parts[client]
    clients, labels = store.cell_columns
    store.cells = CellTable((clients[i] for i in staying), (labels[i] for i in staying))
    store.counts, store.sizes = store.counts[staying], store.sizes[staying]
    store.clients = tuple(other for other in store.clients if other != client)
    store.__dict__.pop("known_clients", None)
    store.__post_init__()
    for named in (store.excluded, store.sealed, store.sealed_second):
        for name in [name for name in named if name[0] == client]:
            del named[name]
    store.purged = {name for name in store.purged if name[0] != client}
    store.unsent.discard(client)
    store.unreported.pop(client, None)
    store.few = {label: own - {client} for label, own in store.few.items() if own - {client}}


def mark_left_out(
    store: MomentStore, client: int, samples: Mapping[int, frozenset[int]], absent: Iterable[int]
) -> None:
    """Note what a client left out of its message: samples by class, and whole classes, as after a purge."""
    missing = [label for label in absent if store.cell((client, label)) is None]
    insert_cells(store, [(client, label) for label in (*samples, *missing)])
    store.purged |= {(client, label) for label in missing}
    for label, ids in samples.items():
        cell = store.cell((client, label))
        assert cell is not None  # it was made above
        store.excluded[cell.name] = ids
        store.sizes[cell.start] = int(store.counts[cell.start]) + len(ids) if int(store.counts[cell.start]) else 0
