"""Counts that one client alone reports: they weigh no more than its rows, and alone they refuse nobody's request."""

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace

from fedup.statistics.proportions import Paired
from fedup.statistics.store import Centroids
from fedup.statistics.tally import Counts, Tally

_PARTS = "retained", "held_out"
LEAST_ROWS = 30  # of a class at other clients: fewer cannot speak against one client
_UNREPORTED = 5  # rows of a class: fewer need not be in the statistics
_CERTAIN = 5.0  # deviations between a client's loss and that of all others
Tallies = Mapping[int, Tally]  # by client


def weighed(tallies: Tallies, store: Centroids, class_parts: Collection[str]) -> dict[int, Tally]:
    """The counts, where no client's weigh more in a class than the rows of it that the client reported when statistics
    were collected; `class_parts` are the requests that are for classes."""
    if store.targets != "classes":
        return dict(tallies)

    def own(client: int, counts: Counts) -> Counts:
        return {label: _at_most(of, _most(store, client, label)) for label, of in counts.items()}

    return {
        client: replace(
            tally,
            retained=own(client, tally.retained),
            held_out=own(client, tally.held_out),
            forgotten={n: own(client, of) if n in class_parts else of for n, of in tally.forgotten.items()},
        )
        for client, tally in tallies.items()
    }


def _most(store: Centroids, client: int, label: int) -> float:
    name = client, label
    cell = store.cell(name)
    if name in store.purged:  # nobody knows any more
        return math.inf
    rows = 0 if cell is None else store.rows_in(cell) + len(store.excluded.get(name, ()))
    return max(rows, _UNREPORTED)


def _at_most(counts: Paired, rows: float) -> Paired:
    share = min(1.0, rows / counts.rows)
    return counts if share == 1 else Paired(*(share * number for number in astuple(counts)))


@dataclass(frozen=True)
class Outvoted:
    """Counts without what one client alone says, and who says what."""

    tallies: Tallies
    alone: Mapping[int, Mapping[int, float]]  # by client set aside: points of each class that it says are lost
    decisive: Mapping[int, int]  # by class that loses too much: the client without whose counts it would not


def without_single_words(tallies: Tallies, max_class_loss: float, but: Collection[int] = ()) -> Outvoted:
    """The counts without those of one client of a class that lose the class too much, against what all others count.
    Not of classes in `but`, which may go.

    The client is believed if it has half of the rows, if the others have few, or if chance may explain the difference.
    """
    kept, alone, decisive = dict(tallies), dict[int, dict[int, float]](), dict[int, int]()
    labels = {label for tally in tallies.values() for label in (*tally.retained, *tally.held_out)}
    for label in sorted(labels - set(but)):
        parts = [{c: of.get(label, Paired()) for c, of in _of_part(tallies, part)} for part in _PARTS]
        by_client = {client: parts[0][client] + parts[1][client] for client in tallies}
        client = max(by_client, key=lambda c: by_client[c].before - by_client[c].after)
        own, rest = by_client[client], sum((by_client[c] for c in by_client if c != client), start=Paired())
        most = max(_loss(sum(part.values(), start=Paired())) for part in parts)
        if not most > max_class_loss >= _loss(rest) or own.before <= own.after:
            continue
        if not _contradicts(own, rest):
            decisive[label] = client
            continue
        without = {part: {c: of for c, of in getattr(kept[client], part).items() if c != label} for part in _PARTS}
        kept[client] = replace(kept[client], **without)
        alone.setdefault(client, {})[label] = _loss(own)
    return Outvoted(kept, alone, decisive)


def _of_part(tallies: Tallies, part: str) -> list[tuple[int, Counts]]:
    return [(client, getattr(tally, part)) for client, tally in tallies.items()]


def _loss(counts: Paired) -> float:
    """In points of recall."""
    return 100 * (counts.before - counts.after) / max(counts.rows, 1e-9)


def _contradicts(own: Paired, rest: Paired) -> bool:
    """Whether a client with the smaller part of the rows says what chance cannot explain, if the others are right."""
    if rest.rows < LEAST_ROWS or own.rows >= rest.rows:
        return False
    total = own + rest
    share = min(max((total.before - total.after) / total.rows, 1 / total.rows), 1 - 1 / total.rows)
    deviation = math.sqrt(share * (1 - share) * (1 / own.rows + 1 / rest.rows))
    return (_loss(own) - _loss(rest)) / 100 >= _CERTAIN * deviation
