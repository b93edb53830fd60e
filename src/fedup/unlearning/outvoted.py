"""Counts that one client alone reports: they weigh no more than its rows, and alone they refuse nobody's request."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from fedup.statistics.moment_store import MomentStore
from fedup.statistics.proportions import Paired
from fedup.statistics.store import Centroids
from fedup.statistics.tally import Counts, Tally, added_counts
from fedup.targets import OUTPUT, Targets

LEAST_ROWS = 30  # of a class at other clients: fewer cannot speak against one client
_UNREPORTED = 5  # rows of a class: fewer need not be in the statistics
_CERTAIN = 5.0  # deviations between a client's loss and that of other clients
_PARTS = "retained", "held_out"
Tallies = Mapping[int, Tally]  # by client
ReportedRows = Callable[[int, int], int | None]  # of a client and a class


def rows_reported_to(store: Centroids, client: int, label: int) -> int | None:
    """Rows of a class that a client reported when statistics were collected; None if its cell was purged since; 1
    stands for too few to report. With other targets all of its rows, which are one cell."""
    label = label if store.targets == "classes" else store.num_classes
    if (client, label) in store.purged:
        return None
    if (cell := store.cell((client, label))) is None:
        return 1 if isinstance(store, MomentStore) and client in store.few.get(label, ()) else 0
    return store.rows_without(cell, frozenset())


def weighed(tallies: Tallies, reported_rows: ReportedRows) -> dict[int, Tally]:
    """The counts by class, where no client's weigh more in a class than the rows of it that the client reported. Those
    of a class that none of the clients reported are left out: who invents one must not have lost it."""
    counted = {client: {*tally.retained, *tally.held_out} for client, tally in tallies.items()}
    held = {label for client, labels in counted.items() for label in labels if reported_rows(client, label) != 0}

    def limited(client: int, counts: Counts) -> Counts:
        reported = {label: reported_rows(client, label) for label in counts.keys() & held}
        most = {label: math.inf if own is None else max(own, _UNREPORTED) for label, own in reported.items()}
        return {label: paired.at_most(most[label]) for label, paired in counts.items() if label in held}

    return {
        client: replace(tally, retained=limited(client, tally.retained), held_out=limited(client, tally.held_out))
        for client, tally in tallies.items()
    }


@dataclass(frozen=True)
class Outvoted:
    """Counts without what one client alone says, and who says what."""

    tallies: Tallies
    alone: Mapping[int, Mapping[int, float]]  # by client set aside: points of each class that it says are lost
    decisive: Mapping[int, int]  # by class that loses too much: the client without whose counts it would not

    def of_outputs(self, outputs: int) -> "Outvoted":
        """The same by output, where counts are by label of rows with it, and after these of rows without it."""
        alone: dict[int, dict[int, float]] = {}
        for client, losses in self.alone.items():
            for label, points in losses.items():
                own = alone.setdefault(client, {})
                own[label % outputs] = max(points, own.get(label % outputs, points))
        return replace(self, alone=alone, decisive={label % outputs: who for label, who in self.decisive.items()})

    def notes(self, targets: Targets) -> list[str]:
        """In words, for each client set aside."""
        lost = {
            client: ", ".join(f"{label} ({points:.0f} points)" for label, points in sorted(losses.items()))
            for client, losses in self.alone.items()
        }
        return [
            f"Client {client} alone counts a loss of {OUTPUT[targets]} {those}, and all others count none beyond what "
            "is allowed: its counts of these are set aside."
            for client, those in lost.items()
        ]


def without_single_words(
    tallies: Tallies, reported_rows: ReportedRows, max_class_loss: float, but: Collection[int] = ()
) -> Outvoted:
    """The counts without those of one client of a class that lose the class too much, against what all others count.
    Not of classes in `but`, which may go.

    The client is believed unless the others contradict it whichever one of them is left out: so no single client can
    have another one set aside. What some clients alone gain makes up for no loss of others.
    """
    tallies = _without_single_gains(tallies)
    kept, alone, decisive = dict(tallies), dict[int, dict[int, float]](), dict[int, int]()
    labels = {label for tally in tallies.values() for label in (*tally.retained, *tally.held_out)}
    for label in sorted(labels - set(but)):
        parts = [{c: getattr(tally, part).get(label, Paired()) for c, tally in tallies.items()} for part in _PARTS]
        by_client = {client: parts[0][client] + parts[1][client] for client in tallies}
        suspect = max(by_client, key=lambda c: by_client[c].before - by_client[c].after)
        others = {client: paired for client, paired in by_client.items() if client != suspect}
        worst_part = max(_loss(_sum(part.values())) for part in parts)
        if not worst_part > max_class_loss >= _loss(_sum(others.values())) or _loss(by_client[suspect]) <= 0:
            continue
        reported = {client: reported_rows(client, label) for client in tallies}
        if not _contradicted(suspect, by_client, reported, max_class_loss):
            decisive[label] = suspect
            continue
        without = {part: {c: of for c, of in getattr(kept[suspect], part).items() if c != label} for part in _PARTS}
        kept[suspect] = replace(kept[suspect], **without)
        alone.setdefault(suspect, {})[label] = _loss(by_client[suspect])
    return Outvoted(kept, alone, decisive)


def _contradicted(
    suspect: int, counts: Mapping[int, Paired], reported: Mapping[int, int | None], max_class_loss: float
) -> bool:
    """Whether the other clients speak against one, whichever single one of them is left out: they hold more rows of
    the class, count enough, find no loss beyond what is allowed, and chance does not explain the difference."""
    held, others = reported[suspect], counts.keys() - {suspect}
    if held is None:  # nobody knows any more
        return False
    all_heard = _sum(counts[client] for client in others)
    all_held = sum(reported[client] or 0 for client in others)
    for left_out in others:
        heard = all_heard - counts[left_out]
        if heard.rows < LEAST_ROWS or held >= all_held - (reported[left_out] or 0):
            return False
        if _loss(heard) > max_class_loss or not _is_beyond_chance(counts[suspect], heard):
            return False
    return bool(others)


def _without_single_gains(tallies: Tallies) -> dict[int, Tally]:
    """The counts, where a client whose gain in a class is beyond chance beside the gains of all others gains nothing:
    "nothing was right before, and all is now" would hide a loss several times as large."""
    gains = {part: added_counts(_gains(getattr(tally, part)) for tally in tallies.values()) for part in _PARTS}

    def bounded(tally: Tally, part: str) -> Counts:
        counts: Counts = getattr(tally, part)
        return {label: _bounded(paired, gains[part][label]) for label, paired in counts.items()}

    return {
        client: replace(tally, retained=bounded(tally, "retained"), held_out=bounded(tally, "held_out"))
        for client, tally in tallies.items()
    }


def _gains(counts: Counts) -> dict[int, Paired]:
    """The counts, where nothing is lost: who says that much was lost says nothing against the gains of others."""
    return {label: replace(paired, after=max(paired.before, paired.after)) for label, paired in counts.items()}


def _bounded(paired: Paired, gains: Paired) -> Paired:
    """A client's counts of a class, without a gain that is beyond chance beside those of all others."""
    others = gains - paired
    unlikely = paired.after > paired.before and others.rows > 0 and _is_beyond_chance(others, paired)
    return replace(paired, after=paired.before, both=paired.before) if unlikely else paired


def _is_beyond_chance(paired: Paired, heard: Paired) -> bool:
    """Whether chance cannot explain that one loss is greater than another."""
    total = paired + heard
    changed = (total.before + total.after - 2 * total.both) / total.rows
    share = min(max(changed, 1 / total.rows), 1 - 1 / total.rows)
    deviation = math.sqrt(share * (1 - share) * (1 / paired.rows + 1 / heard.rows))
    return (_loss(paired) - _loss(heard)) / 100 >= _CERTAIN * deviation


def _sum(counts: Iterable[Paired]) -> Paired:
    return sum(counts, start=Paired())


def _loss(paired: Paired) -> float:
    """In points of recall."""
    return 100 * (paired.before - paired.after) / max(paired.rows, 1e-9)
