"""Which requests are answered now, and which wait for others because they have too few rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedup.clients.protocol import Contact
from fedup.errors import RequestError
from fedup.request import Forget, union
from fedup.run.in_words import class_in_words, client_in_words, count
from fedup.run.new_request import NewRequest
from fedup.run.state import Request, State
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName, Centroids
from fedup.unlearning.few_rows import (
    ask_for_labels,
    has_few_rows_rule,
    returning_too_few,
    rows_beside,
    waiting_for_others,
)

_MOST_CELLS = 3  # named in a sentence


@dataclass(frozen=True)
class Pool:
    """New requests and those that waited, sorted out."""

    ready: Sequence[NewRequest]
    waiting: Sequence[NewRequest] = ()
    why: Mapping[Forget, str] = field(default_factory=dict)
    alone: Sequence[NewRequest] = ()  # new ones that are ready without those that waited


def sort_out(
    state: State, store: Centroids, new: Sequence[NewRequest], contact: Contact | None, *, pending: bool
) -> Pool:
    """Answer as many as possible. Requests that waited join those for samples or persons, or all if `pending`."""
    rows_only = [request for request in new if request.forget.names_rows_only]
    if not (isinstance(store, MomentStore) and has_few_rows_rule(store)) or contact is None:
        return Pool(new, alone=new)
    if not rows_only and not pending:
        return Pool(new, alone=new)
    known = {request.forget for request in new}
    pool = [
        NewRequest(request.forget, request.reference, request.entry["rows"])
        for request in state.waiting
        if request.forget not in known
    ]
    others = [request for request in new if request not in rows_only]
    in_force = union([*state.forgets, *store.open, *(request.forget for request in others)])
    candidates = [request.forget for request in (*rows_only, *pool)]
    ask_for_labels(store, [in_force, *candidates], contact)
    short = waiting_for_others(store, in_force, candidates)
    short_alone = waiting_for_others(store, in_force, [request.forget for request in rows_only])
    return Pool(
        ready=[request for request in (*new, *pool) if request.forget not in short],
        waiting=[request for request in new if request.forget in short],
        why={forget: _reason(state, store, cells) for forget, cells in short.items()},
        alone=[request for request in new if request.forget not in short_alone],
    )


def check_return(state: State, store: Centroids, restored: Sequence[Request]) -> None:
    """Refuse to take requests back whose rows would come back to the sums so few at a time that these show them."""
    ids = {request.id for request in restored}
    staying = [request for request in (*state.active, *state.open) if request.id not in ids]
    cells = returning_too_few(store, union(request.forget for request in staying)) if staying else []
    if not cells:
        return
    with_it = [own["id"] for request in restored for own in request.answered_in.body["requests"]]
    together = sorted({*with_it, *ids} & {request.id for request in state.active}, key=lambda name: int(name[1:]))
    advice = f"Take back together what was answered together: {', '.join(together)}" if set(together) > ids else ""
    raise RequestError(
        f"{', '.join(sorted(ids))} cannot be taken back alone: {_few(state, store, cells, 'come back to')}. "
        f"{advice or 'Take back others with it'}; or all. Nothing was changed."
    )


def _few(state: State, store: Centroids, cells: Sequence[CellName], do: str) -> str:
    """That too few rows would leave cells, or come back to them."""
    of_class = "class {} at " if store.targets == "classes" else ""  # other targets have one cell for each client
    clients, classes = (state.about.get(name, ()) for name in ("client_names", "class_names"))
    places = [
        f"{of_class.format(class_in_words(label, classes))}client {client_in_words(client, clients)}"
        for client, label in cells[:_MOST_CELLS]
    ]
    more = f" and {count(len(cells) - _MOST_CELLS, 'more cell')}" if len(cells) > _MOST_CELLS else ""
    assert isinstance(store, MomentStore)  # others have no such rule
    where = ", ".join(places) + more
    return f"fewer than {store.config.least_rows} rows would {do} {where}, and their sums would show them"


def _reason(state: State, store: MomentStore, cells: Sequence[CellName]) -> str:
    """Why a request waits, and what it would cost others not to."""
    beside = rows_beside(store, cells)
    return (
        f"{_few(state, store, cells, 'leave')}. To answer it now would take all {count(beside, 'row')} there out of "
        "the statistics. It is answered together with later requests for samples or persons there, as soon as they are "
        "enough"
    )
