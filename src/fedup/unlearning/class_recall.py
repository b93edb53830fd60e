"""The recall of each class under a filter: a request must not harm those who did not ask."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedup.errors import HarmError
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.proportions import Paired
from fedup.statistics.store import CellName, Centroids
from fedup.statistics.tally import Tally, added_counts
from fedup.targets import MEASURE, OUTPUT, Targets
from fedup.unlearning.bottleneck_fit import names_cell

_A = {"classes": "a class", "labels": "a label", "values": "an output"}
OF_ALL = 5 / 3  # a delta may cost all classes together 3 points where it may cost one 5, as in a run folder
LEAST_CLASS_ROWS = 20  # a class with fewer retained rows counts as lost
_ENOUGH_HELD_OUT = 30  # held-out rows of a class: from so many on, recall is measured on them


@dataclass(frozen=True)
class Recall:
    """The recall of a class on retained rows, of the original model and under the filter."""

    before: float
    after: float
    rows: int

    @property
    def loss(self) -> float:
        """In points."""
        return 100 * (self.before - self.after)


@torch.no_grad()
def recall_at_cut(plugged: PluggedModel, centroids: Centroids, served: Served, forget_set: Forget) -> dict[int, Recall]:
    """By class, on retained centroids weighted by their points; sees only filters at the centroids' cut."""
    used = [cell for cell in centroids.cells if not names_cell(forget_set, cell) and not centroids.awaits(cell)]
    rows = centroids.rows_of(used)
    vectors, labels, weights = centroids.vectors[rows], centroids.row_labels()[rows], centroids.counts[rows].double()
    tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
    filters = [fitted.to(vectors.device) for cut, fitted in served.placed if cut == plugged.cut]
    before, after = [], []
    for part, wanted in zip(vectors.split(1024), labels.split(1024), strict=True):
        passed = part.reshape(-1, *centroids.shape)
        for fitted in filters:
            passed = fitted(passed)
        before.append(tail(part).argmax(1) == wanted)
        after.append(tail(passed.flatten(1)).argmax(1) == wanted)
    hits = [weights * torch.cat(parts) for parts in (before, after)]
    recalls = {}
    for label in labels.unique().tolist():
        own = labels == label
        points = float(weights[own].sum())
        before_share, after_share = (float(hit[own].sum()) / points for hit in hits)
        recalls[label] = Recall(before_share, after_share, round(points))
    return recalls


def recall_from_tallies(tallies: Collection[Tally], targets: Targets, outputs: int) -> dict[int, Recall]:
    """By class, from the clients' counts on retained rows: held-out rows, or training rows if these are too few.

    Of a label it is the mean over rows with it and rows without it, so that a rare one counts as much; of a value R².
    """
    training, held_out = (added_counts(getattr(tally, part) for tally in tallies) for part in ("retained", "held_out"))
    chosen = training | {label: counts for label, counts in held_out.items() if enough_held_out(counts.rows)}
    recalls = {
        label: Recall(counts.before / counts.rows, counts.after / counts.rows, round(counts.rows))
        for label, counts in sorted(chosen.items())
    }
    if targets != "labels":
        return recalls
    both = [label for label in range(outputs) if label in recalls and outputs + label in recalls]
    balanced = {label: (recalls[label], recalls[outputs + label]) for label in both}
    return {
        label: Recall((yes.before + no.before) / 2, (yes.after + no.after) / 2, yes.rows)
        for label, (yes, no) in balanced.items()
    }


def loss_of_all(tallies: Collection[Tally]) -> float:
    """The points of recall that all rows lose together: held-out ones, or training rows if these are too few."""
    for part in ("held_out", "retained"):
        counts = sum(added_counts(getattr(tally, part) for tally in tallies).values(), Paired())
        if enough_held_out(counts.rows):
            return 100 * (counts.before - counts.after) / counts.rows
    return 0.0


def check_all_classes(tallies: Collection[Tally], max_class_loss: float) -> None:
    """Raise if all classes together would lose more than 3 points where one may lose 5."""
    lost = loss_of_all(tallies)
    if OF_ALL * lost > max_class_loss + 1e-9:
        raise HarmError(
            f"The answer would harm those who did not ask: all classes together would lose {lost:.1f} points of recall "
            f"on retained rows; {max_class_loss / OF_ALL:.2g} are allowed under a delta. Nothing was changed. Serve it "
            "all the same with force=True, allow more with terms=Terms(max_class_loss=…), or retrain without the rows."
        )


def enough_held_out(rows: Any) -> Any:
    """Whether so many held-out rows of a class, or each of several, say what its recall is."""
    return rows >= _ENOUGH_HELD_OUT


def check_recall(
    recalls: Mapping[int, Recall],
    forget_set: Forget,
    *,
    max_class_loss: float,
    targets: Targets = "classes",
    decisive: Mapping[int, int] | None = None,
) -> None:
    """Raise if a class that nobody asked to forget would lose more than `max_class_loss` points; `decisive` has, by
    class, the client whose counts alone make it so."""
    beyond = {label: recall for label, recall in recalls.items() if recall.loss > max_class_loss + 1e-9}
    harmed = {label: recall for label, recall in beyond.items() if label not in forget_set.class_ids}
    if harmed:
        losses = "; ".join(
            f"{OUTPUT[targets]} {label} would lose {recall.loss:.1f} points of {MEASURE[targets]} on retained rows "
            f"({recall.before:.3f} → {recall.after:.3f}"
            + (f"; not without the counts of client {decisive[label]})" if decisive and label in decisive else ")")
            for label, recall in sorted(harmed.items(), key=lambda pair: -pair[1].loss)
        )
        raise HarmError(
            f"The answer would harm those who did not ask: {losses}; {max_class_loss:g} are allowed, and nobody asked "
            "to forget that. Nothing was changed. Serve it all the same with force=True, allow more with "
            "terms=Terms(max_class_loss=…), or retrain without the rows.",
            classes=sorted(harmed),
        )


def lost_classes(centroids: Centroids, forget_set: Forget, *, answered: bool = False) -> dict[int, int]:
    """`{class: rows left}` of classes that nobody asked to forget and that requests leave with too few rows.

    Cells that wait for their client count as empty, unless it is taken to have `answered`. With moments no class is
    lost by that: those that only wait are kept as they were.

    Under differential privacy row counts are unknown; a class that does not stand out of the noise gets a note.
    """
    if centroids.dp is not None:
        return {}
    if isinstance(centroids, MomentStore) and centroids.targets != "classes":
        left = enumerate(centroids.target_sums(centroids.retained(forget_set)))
        return {out: rows for out, rows in left if rows < LEAST_CLASS_ROWS and out not in forget_set.class_ids}
    waiting = [] if answered or isinstance(centroids, MomentStore) else centroids.cells_pending
    rows, taken, samples = centroids.rows_by_class(), set(), _samples_by_cell(centroids, forget_set)
    for cell in (cell for client in forget_set.client_ids for cell in centroids.cells_of(client)):
        own = centroids.rows_in(cell)
        rows[cell.label] -= own
        taken |= {cell.label} if own else set()
    for name in samples.keys() | centroids.excluded.keys():
        client, label = name
        changing, named = centroids.cell(name), frozenset(samples.get(name, ()))
        if client not in forget_set.client_ids and changing is not None and changing not in waiting:
            rows[label] += centroids.rows_without(changing, named) - centroids.rows_in(changing)
            taken |= {label} if named else set()
    for cell in (cell for cell in waiting if cell.client not in forget_set.client_ids):
        rows[cell.label] -= centroids.rows_in(cell)
        taken.add(cell.label)
    uncertain = {label for client, label in centroids.purged if client not in forget_set.client_ids}
    candidates = sorted(taken - forget_set.class_ids - uncertain)
    return {label: rows[label] for label in candidates if rows[label] < LEAST_CLASS_ROWS}


def _samples_by_cell(centroids: Centroids, forget_set: Forget) -> dict[CellName, set[int]]:
    """The samples that are to be forgotten, where their class is known."""
    cells: defaultdict[CellName, set[int]] = defaultdict(set)
    for client, ids in forget_set.sample_ids.items():
        labels = centroids.sample_labels.get(client, {})
        for i in ids & labels.keys():
            cells[client, labels[i]].add(i)
    return cells


def _waiting_for(centroids: Centroids) -> str:
    clients = ", ".join(str(client) for client, labels in sorted(centroids.pending.items()) if labels)
    about = f"Client {clients} has not answered, and what it sent before holds forgotten rows: ask again when it is "
    return f"{about}back. " if clients else ""


def check_classes_left(
    centroids: Centroids,
    forget_set: Forget,
    before: Forget,
    known: Mapping[int, int] | None = None,
    waiting: Collection[int] = (),
) -> None:
    """Raise if requests would newly lose a class that nobody asked to forget, or leave only one class.

    Classes that are lost already are `known`, or looked up; those of clients that were waited for are `waiting`.
    """
    known = lost_classes(centroids, before, answered=True) if known is None else known
    remaining = lost_classes(centroids, forget_set)
    lost = {label: rows for label, rows in remaining.items() if label not in known and label not in waiting}
    if lost:
        name = OUTPUT[centroids.targets]
        losses = "; ".join(f"{name} {label} ({rows} rows stay)" for label, rows in lost.items())
        as_well = "Say" if centroids.targets == "values" else f"Forget the {name} as well, or say"
        raise HarmError(
            f"To {forget_set} leaves fewer than {LEAST_CLASS_ROWS} training rows of {_A[centroids.targets]} that "
            f"nobody asked to forget, so that it would be lost: {losses}. {_waiting_for(centroids)}Nothing was "
            f"changed. {as_well} that it may go with force=True.",
            classes=sorted(lost),
        )
    held = centroids.classes_held()
    if len(held) > 2 and len(held - forget_set.class_ids) == 1 and len(held - before.class_ids) > 1:
        (left,) = held - forget_set.class_ids
        raise HarmError(
            f"To {forget_set} leaves class {left} alone: the model would answer it to everything. Nothing was changed. "
            "Say that this is meant with force=True, or take the model out of service.",
            classes=[left],
        )
