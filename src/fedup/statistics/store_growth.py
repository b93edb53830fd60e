"""A store of centroids, or of releases under DP, with the cells of one client exchanged or added."""

from dataclasses import replace

import torch
from torch import Tensor

from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.store import Cell, CellName, Centroids


def with_client(store: Centroids, summary: Summary, absent: frozenset[int]) -> Centroids:
    """The store with a client's message in place of all that it sent before, or added.

    Cells of the classes in `absent` stay without content, as after a purge: the client was not asked for them. A new
    client's have no room either: if such a class comes back, the client is to be collected from again.
    """
    client, contents = summary.client, dict[CellName, tuple[Tensor, Tensor]]()
    for cell in store.cells:
        if cell.client != client:
            contents[cell.name] = store.vectors[cell.slot], store.counts[cell.slot]
        elif cell.label in absent and cell.label not in summary.labels:
            contents[cell.name] = torch.zeros_like(store.vectors[cell.slot]), torch.zeros_like(store.counts[cell.slot])
    if client not in store.known_clients:
        nothing = store.vectors[:0], store.counts[:0]
        contents |= {(client, label): nothing for label in absent if label not in summary.labels}
    emptied = {name for name in contents if name[0] == client}
    vectors, counts = (part.split(list(summary.sizes)) for part in (summary.vectors, summary.counts))
    for label, *content in zip(summary.labels, vectors, counts, strict=True):
        contents[client, label] = _with_room(store, content[0], content[1], summary.rows.get(label, 0))
    cells, start = [], 0
    for name in sorted(contents):
        cells.append(Cell(*name, start, len(contents[name][1])))
        start += cells[-1].size
    left_out = {(client, label): ids for label, ids in zip(summary.labels, summary.excluded, strict=True) if ids}
    return replace(
        store,
        vectors=torch.cat([contents[cell.name][0].to(store.vectors) for cell in cells]),
        counts=torch.cat([contents[cell.name][1].to(store.counts) for cell in cells]),
        cells=tuple(cells),
        clients=tuple(sorted({*store.clients, client})),
        excluded={name: ids for name, ids in store.excluded.items() if name[0] != client} | left_out,
        purged={name for name in store.purged if name[0] != client} | emptied,
        sealed={name: content for name, content in store.sealed.items() if name[0] != client},
    )


def _with_room(store: Centroids, vectors: Tensor, counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The content of a cell, with room for the rows that are left out of it now."""
    room = centroid_count(rows, store.how.ratio) if isinstance(store.how, CentroidConfig) and rows else 1
    more = max(0, room - len(counts))
    return torch.cat([vectors, vectors.new_zeros(more, vectors.shape[1])]), torch.cat([counts, counts.new_zeros(more)])
