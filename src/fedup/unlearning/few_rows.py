"""Requests that wait: so few rows of a cell would leave that their sums would show them, or all of it would go."""

from collections.abc import Collection, Mapping

from fedup.clients.labels import LabelsQuestion
from fedup.clients.protocol import Contact, ask_those_there
from fedup.request import Forget, union
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName, Centroids

Short = Mapping[Forget, list[CellName]]  # requests that wait, each with the cells of which it has too few rows


def has_few_rows_rule(store: Centroids) -> bool:
    """Whether the store keeps sums, of which no client takes away those of a few rows."""
    return isinstance(store, MomentStore) and store.config.least_rows > 1


def ask_for_labels(store: Centroids, requests: Collection[Forget], contact: Contact) -> None:
    """Learn the classes of all samples that the requests name, from the clients that hold them."""
    named, known = union(requests).sample_ids, store.sample_labels
    unknown = {client: ids - known.get(client, {}).keys() for client, ids in named.items()}
    questions = {client: LabelsQuestion(ids) for client, ids in unknown.items() if ids}
    for client, labels in ask_those_there(contact, questions, bound=questions).items():
        known[client] = {**known.get(client, {}), **labels}


def waiting_for_others(store: MomentStore, in_force: Forget, requests: Collection[Forget]) -> Short:
    """The requests that cannot be answered together with those in force. The order does not matter: if some of them
    lack rows in a cell, all that name rows of it wait, and the others are looked at again without them."""
    candidates, waiting = set(requests), dict[Forget, list[CellName]]()
    while candidates:
        wanted = _by_cell(store, union([in_force, *candidates]))
        short = {name for name, ids in wanted.items() if not _may_leave(store, name, ids)}
        blocked = {request: sorted(short & _by_cell(store, request).keys()) for request in candidates}
        blocked = {request: cells for request, cells in blocked.items() if cells}
        if not blocked:
            break
        waiting |= blocked
        candidates -= blocked.keys()
    return waiting


def returning_too_few(store: Centroids, left_out: Forget) -> list[CellName]:
    """Cells to which fewer rows would come back than clients report, where only this is left out from now on."""
    if not isinstance(store, MomentStore):
        return []
    least, wanted, short = store.config.least_rows, _by_cell(store, left_out), []
    for name, before in store.excluded.items():
        cell, after = store.cell(name), wanted.get(name, set())
        rows = 0 if cell is None else int(store.sizes[cell.start]) or int(store.counts[cell.start]) + len(before)
        both_partly = all(len(ids) >= least and rows - len(ids) >= least for ids in (before, after))
        if both_partly and 0 < len(before - after) < least:
            short.append(name)
    return sorted(short)


def shows_rows(store: Centroids, request: Forget, others: Forget) -> bool:
    """Whether sums with the request and without it would differ by so few rows of a cell that they show them."""
    if not isinstance(store, MomentStore):
        return False
    own, besides = _by_cell(store, request), _by_cell(store, others)
    return any(0 < len(ids - besides.get(name, set())) < store.config.least_rows for name, ids in own.items())


def rows_beside(store: MomentStore, cells: Collection[CellName]) -> int:
    """Rows of these cells: all of them would leave if the request were answered now."""
    found = [cell for name in cells if (cell := store.cell(name)) is not None]
    return sum(int(store.counts[cell.start]) for cell in found)


def _by_cell(store: MomentStore, request: Forget) -> dict[CellName, set[int]]:
    """Its samples by cell, as far as the store has something of the cell."""
    cells: dict[CellName, set[int]] = {}
    for client, ids in request.sample_ids.items():
        labels = store.sample_labels.get(client, {})
        for i in ids & labels.keys():
            name = client, labels[i]
            if store.cell(name) is not None and name not in store.purged:
                cells.setdefault(name, set()).add(i)
    return cells


def _may_leave(store: MomentStore, name: CellName, wanted: set[int]) -> bool:
    """Whether a client would take exactly these rows out of a cell: enough of them change at once; or so few would
    stay that they must leave, too."""
    cell, least, before = store.cell(name), store.config.least_rows, store.excluded.get(name, frozenset())
    assert cell is not None  # _by_cell has no others
    rows = int(store.sizes[cell.start]) or int(store.counts[cell.start]) + len(before)
    if rows - len(wanted) < least:
        return True
    if len(wanted) < least:
        return False
    if len(before) in range(1, least) or rows - len(before) < least:  # nothing of the cell is in the sums
        return True
    changes = wanted - before, before - wanted
    return all(not change or len(change) >= least for change in changes)
