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
    if moments.width != store.total.width or len(moments.counts) != store.num_classes:
        raise DataError(f"Client {client} sent moments of another width or label set than the totals.")
    total = store.total + moments
    total.check(store.config)
    unheld = store.total.counts == 0
    labels = moments.counts.nonzero().flatten().tolist()
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
