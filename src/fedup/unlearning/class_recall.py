"""What a filter does to each class: a request must not cost those who did not ask."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedup.errors import HarmError
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.proportions import Paired
from fedup.statistics.store import Cell, Centroids
from fedup.statistics.tally import Counts, Tally
from fedup.unlearning.bottleneck_fit import names_cell

LEAST_CLASS_ROWS = 20  # retained rows of a class below which it counts as lost
_ENOUGH_HELD_OUT = 30  # rows of a class that clients hold out, for its recall on them to say more than on training rows


@dataclass(frozen=True)
class Recall:
    """The share of a class's retained rows that are answered right, by the original and under the filter."""

    before: float
    after: float
    rows: int

    @property
    def loss(self) -> float:
        """In points."""
        return 100 * (self.before - self.after)


@torch.no_grad()
def recall_on_vectors(
    plugged: PluggedModel,
    centroids: Centroids,
    served: Served,
    vectors: torch.Tensor,
    labels: torch.Tensor,
    counts: torch.Tensor,
) -> dict[int, Recall]:
    """By class, from features at the cut: centroids, each as often as it has points, or features drawn under DP."""
    tail = flat_tail(shared_view(plugged.base, frozen=True), plugged.cut, centroids.shape)
    hits: dict[str, list[Tensor]] = {"before": [], "after": []}
    filters: list[nn.Module] = [fitted.to(vectors.device) for _, fitted in served.placed]
    for part, wanted in zip(vectors.split(1024), labels.split(1024), strict=True):
        passed = part.reshape(-1, *centroids.shape)
        for fitted in filters:
            passed = fitted(passed)
        hits["before"].append(tail(part).argmax(1) == wanted)
        hits["after"].append(tail(passed.flatten(1)).argmax(1) == wanted)
    before, after, weights = torch.cat(hits["before"]), torch.cat(hits["after"]), counts.double()
    found = {}
    for label in labels.unique().tolist():
        own = labels == label
        rows = float(weights[own].sum())
        one, other = (float((weights * hit)[own].sum()) / rows for hit in (before, after))
        found[label] = Recall(one, other, round(rows))
    return found


def recall_at_cut(plugged: PluggedModel, centroids: Centroids, served: Served, forget_set: Forget) -> dict[int, Recall]:
    """By class, on retained centroids: what acts at their cut."""
    if served.erasure is not None and served.erasure.cut != plugged.cut:
        served = replace(served, erasure=None)
    rows = centroids.rows_of([cell for cell in centroids.cells if not names_cell(forget_set, cell)])
    return recall_on_vectors(
        plugged, centroids, served, centroids.vectors[rows], centroids.row_labels()[rows], centroids.counts[rows]
    )


def recall_from_tallies(tallies: Collection[Tally]) -> dict[int, Recall]:
    """By class, from what clients counted on rows that stay: those they hold out, which are as unseen as what is asked
    in service, and training rows where there are too few of them."""
    training, held_out = (_added(getattr(one, part) for one in tallies) for part in ("retained", "held_out"))
    chosen = training | {label: counts for label, counts in held_out.items() if counts.rows >= _ENOUGH_HELD_OUT}
    return {
        label: Recall(counts.before / counts.rows, counts.after / counts.rows, round(counts.rows))
        for label, counts in sorted(chosen.items())
    }


def _added(tallied: Iterable[Counts]) -> dict[int, Paired]:
    added: dict[int, Paired] = {}
    for one in tallied:
        for label, counts in one.items():
            added[label] = added.get(label, Paired()) + counts
    return added


def check_recall(recalls: Mapping[int, Recall], gone: Forget, *, max_class_loss: float) -> None:
    """Raise if a class that nobody asked to forget would lose more than so many points."""
    harmed = {
        label: recall
        for label, recall in recalls.items()
        if label not in gone.class_ids and recall.loss > max_class_loss + 1e-9
    }
    if harmed:
        told = "; ".join(
            f"class {label} would lose {one.loss:.1f} points of recall on retained rows "
            f"({one.before:.3f} → {one.after:.3f})"
            for label, one in sorted(harmed.items(), key=lambda pair: -pair[1].loss)
        )
        raise HarmError(
            f"The answer would harm those who did not ask: {told}; {max_class_loss:g} are allowed, and nobody asked to "
            "forget that. Nothing was changed. Serve it all the same with force=True, allow more with "
            "terms=Terms(max_class_loss=…), or retrain without the rows.",
            classes=sorted(harmed),
        )


def retained_rows(centroids: Centroids, gone: Forget) -> dict[int, tuple[int, bool]]:
    """By class: training rows that requests leave, as far as the centroids tell, and whether they take any."""
    counts = centroids.counts.tolist()
    rows: dict[int, int] = {}
    taken: set[int] = set()
    for cell in centroids.cells:
        points = sum(counts[cell.slot])
        if cell.client in gone.client_ids:
            taken |= {cell.label} if points else set()
            continue
        named = _samples_in(cell, centroids, gone)
        already = centroids.excluded.get(cell.name, frozenset())
        taken |= {cell.label} if named else set()
        rows[cell.label] = rows.get(cell.label, 0) + points - len(named - already) + len(already - named)
    held = {cell.label for cell in centroids.cells}
    return {label: (rows.get(label, 0), label in taken) for label in sorted(held - gone.class_ids)}


def _samples_in(cell: Cell, centroids: Centroids, gone: Forget) -> frozenset[int]:
    known = centroids.sample_labels.get(cell.client, {})
    return frozenset(i for i in gone.sample_ids.get(cell.client, ()) if known.get(i) == cell.label)


def lost_classes(centroids: Centroids, gone: Forget) -> dict[int, int]:
    """Classes that nobody asked to forget and of which requests leave too few rows: `{class: rows left}`.

    Under differential privacy nobody knows how many rows there are; what does not stand out of the noise is noted.
    """
    if centroids.dp is not None:
        return {}
    uncertain = {label for client, label in centroids.purged if client not in gone.client_ids}
    return {
        label: rows
        for label, (rows, taken) in retained_rows(centroids, gone).items()
        if taken and rows < LEAST_CLASS_ROWS and label not in uncertain
    }


def check_classes_left(centroids: Centroids, gone: Forget, before: Forget) -> None:
    """Raise where requests would lose a class that nobody asked to forget (those lost before are known), or leave one
    class alone."""
    lost = {
        label: rows
        for label, rows in lost_classes(centroids, gone).items()
        if label not in lost_classes(centroids, before)
    }
    if lost:
        told = "; ".join(f"class {label} ({rows} rows stay)" for label, rows in lost.items())
        raise HarmError(
            f"To {gone} leaves fewer than {LEAST_CLASS_ROWS} training rows of a class that nobody asked to forget, so "
            f"that it would be lost: {told}. Nothing was changed. Forget the class as well, or say that it may go with "
            "force=True.",
            classes=sorted(lost),
        )
    held = {cell.label for cell in centroids.cells}
    if len(held) > 2 and len(held - gone.class_ids) == 1 and len(held - before.class_ids) > 1:
        (left,) = held - gone.class_ids
        raise HarmError(
            f"To {gone} leaves class {left} alone: the model would answer it to everything. Nothing was changed. Say "
            "that this is meant with force=True, or take the model out of service.",
            classes=[left],
        )
