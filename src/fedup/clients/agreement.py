"""Which of several nodes' answers disagree with all the others: in length, in rows, or in what their classes look like.

A node is compared with the middle of the nodes, never with their sum: a few of them cannot move it far, whatever they
send. A class of a node counts as mistaken only if two witnesses say so. Its mean is nearer to another class's centre
than to its own, and the last layer, which nobody can change any more, answers another class. One alone is no evidence:
where nodes hold few classes, the model is often wrong on honest rows, and centres of rare classes are uncertain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from fedup.clients.profiles import Columns, Profile, Profiles

__all__ = ["Profile", "mistaken", "too_long", "too_many_rows", "weighted_median"]

LEAST_NODES = 3  # that can be compared
LEAST_HOLDERS = 3  # of a class, for a centre
LEAST_ROWS = 5  # of a class at a node: the mean of fewer says little
MOST_LENGTH = 3.0  # times the middle node's: longer rows count too much, whoever has them
MISTAKEN_SHARE = 0.5  # of a node's rows
MISTAKEN_CLASS = 0.2  # of a class's rows anywhere, from one node; counts where the model is a good witness
_MANY_ROWS = 20
_GOOD_WITNESS = 0.8  # share of the middle node's rows in classes whose means the last layer answers rightly
_CLEAR = 4.0  # deviations of noise
_WITHIN = 1.5  # times the middle distance of a class's means from their centre
_CELLS_AT_ONCE = 2048  # whose distances are in memory
_COLUMNS_AT_ONCE = 16  # of means that are read for a median
_SORTED_AT_ONCE = 2**17  # numbers, 64 bits each
_PLACES = 2**29 - 1  # the bits that are 0 in double precision where single precision is enough
_AT_ONCE = 0.1  # share of the suspects that are set aside before the others are judged again

Answers = Callable[[Tensor], Tensor]  # what the last layer answers to features (N, D): classes (N,)


def too_long(profiles: Mapping[int, Profile], most: float = MOST_LENGTH) -> dict[int, str]:
    """Nodes whose features are far longer than those of the middle node."""
    lengths = {node: length for node, length in Profiles.of(profiles).lengths().items() if length > 0}
    if len(lengths) < LEAST_NODES:
        return {}
    usual = median(lengths.values())
    return {
        node: f"its features are {length / usual:.3g} times as long as the middle node's; {most:g} are taken at most"
        for node, length in lengths.items()
        if length > most * usual
    }


def too_many_rows(profiles: Mapping[int, Profile], declared: Mapping[int, int], most: float) -> dict[int, str]:
    """Nodes that claim more rows than they declared, or, where they declared none, far more than the middle node."""
    columns = Profiles.of(profiles).columns()
    totals = columns.totals
    usual = float(np.median(totals.numpy())) if len(columns.nodes) >= LEAST_NODES else None
    noise = columns.rows.abs().clamp_(min=1).mul_(columns.deviation)  # of a sum: counts have noise of that order
    slack = 2 * _CLEAR * columns.per_node(noise.square_()).sqrt()  # by which noise may have raised the total
    reasons = {}
    for node, total in zip(columns.nodes, (totals - slack).tolist(), strict=True):
        if node in declared:
            if total > declared[node] + 0.5:
                reasons[node] = f"it reports {total:,.0f} rows or more, and declared {declared[node]:,}"
        elif usual is not None and total > most * max(usual, 1.0):
            reasons[node] = (
                f"it reports {total / max(usual, 1.0):.3g} times the rows of the middle node, at most {most:g}"
            )
    return reasons


def mistaken(profiles: Mapping[int, Profile], answers: Answers | None, num_classes: int) -> dict[int, str]:
    """Nodes of which much looks like another class than they say.

    The worst are set aside before the others are judged again: what they sent must not make others look wrong.
    """
    columns, reasons = Profiles.of(profiles).columns(), dict[int, str]()
    left, witnesses = torch.ones(len(columns.nodes), dtype=torch.bool), _answered(columns, answers)
    while int(left.sum()) >= LEAST_NODES:
        judged = _judge(columns, left, witnesses, num_classes)
        suspects = {place: own for place, own in judged.items() if own[0] >= 1}
        if not suspects or len(reasons) + 1 > len(columns.nodes) // 2:  # most are right, or nobody knows who is
            break
        worst = sorted(suspects, key=lambda place: (-suspects[place][0], columns.nodes[place]))
        for place in worst[: max(1, int(_AT_ONCE * len(worst)))]:
            reasons[columns.nodes[place]] = suspects[place][1]
            left[place] = False
    return reasons


def _answered(columns: Columns, answers: Answers | None) -> Tensor | None:
    """What the last layer answers to the mean of each cell; None where it cannot say, as a blank one. (M,)"""
    if answers is None:
        return None
    answered = torch.zeros(len(columns.node), dtype=torch.int64)  # filled: many small pieces would hold memory apart
    for part in torch.arange(len(columns.node)).split(_CELLS_AT_ONCE):
        answered[part] = answers(columns.means(part).float())
    return answered if bool((answered >= 0).any()) else None


def _judge(columns: Columns, left: Tensor, witnesses: Tensor | None, num_classes: int) -> dict[int, tuple[float, str]]:
    """By the place of a node, how far it is beyond what is allowed (1 or more: beyond), and why."""
    centres, trusted = _Centres.of(columns, left, num_classes), _is_good_witness(columns, left, witnesses)
    totals, judged = columns.totals, {}
    for place, wrong in _wrong_cells(columns, left, centres, witnesses).items():
        rows = {int(columns.labels[i]): float(columns.rows[i]) for i in wrong}
        share = sum(rows.values()) / max(float(totals[place]), 1.0)
        many = {label: n for label, n in rows.items() if n >= _MANY_ROWS and trusted}
        of_class = max((n / float(centres.rows[label]) for label, n in many.items()), default=0.0)
        looks = ", ".join(f"{int(columns.labels[i])} (like {other})" for i, other in list(wrong.items())[:5])
        seen = "" if witnesses is None else ", and the model agrees"
        why = f"{share:.0%} of its rows look like another class than it says{seen}: class {looks}"
        judged[place] = max(share / MISTAKEN_SHARE, of_class / MISTAKEN_CLASS), why
    return judged


def _is_good_witness(columns: Columns, left: Tensor, witnesses: Tensor | None) -> bool:
    if witnesses is None:
        return False
    totals, right = columns.totals, columns.per_node(columns.rows * (witnesses == columns.labels))
    held = torch.bincount(columns.node, minlength=len(left)) > 0
    shares = (right / totals)[left & held & (totals > 0)]
    return len(shares) > 0 and float(np.median(shares.numpy())) >= _GOOD_WITNESS


@dataclass(frozen=True, eq=False)
class _Centres:
    """The middle of the nodes' means of each class."""

    points: Tensor  # (K, D)
    known: Tensor  # (K,) whether enough nodes hold the class
    radius: Tensor  # (K,) the middle distance of the nodes' means from it
    rows: Tensor  # (K,) of all nodes

    @classmethod
    def of(cls, columns: Columns, left: Tensor, num_classes: int) -> "_Centres":
        kept = left.index_select(0, columns.node)
        rows = torch.zeros(num_classes, dtype=torch.float64)
        rows.index_add_(0, columns.labels[kept], columns.rows[kept].clamp(min=0))
        points = rows.new_zeros(num_classes, columns.width)
        known, radius = torch.zeros(num_classes, dtype=torch.bool), torch.zeros_like(rows)
        for label in range(num_classes):
            cells = (kept & (columns.labels == label) & (columns.rows >= LEAST_ROWS)).nonzero().flatten()
            if len(cells) >= LEAST_HOLDERS:
                points[label], known[label] = _middle(columns, cells), True
                distances = torch.zeros(len(cells), dtype=torch.float64)
                for start, part in zip(range(0, len(cells), _CELLS_AT_ONCE), cells.split(_CELLS_AT_ONCE), strict=True):
                    apart = columns.means(part).double().sub_(points[label])
                    distances[start : start + len(part)] = apart.norm(dim=1)
                radius[label] = float(np.median(distances.numpy()))
        return cls(points, known, radius, rows)


def _middle(columns: Columns, cells: Tensor) -> Tensor:
    """The weighted median of the means of these cells, by some of their columns at once. (D,)"""
    weights, width = columns.rows[cells], columns.width
    blocks = (slice(start, start + _COLUMNS_AT_ONCE) for start in range(0, width, _COLUMNS_AT_ONCE))
    return torch.cat([_weighted_median(columns.means(cells, block), weights) for block in blocks])


def _wrong_cells(
    columns: Columns, left: Tensor, centres: _Centres, witnesses: Tensor | None
) -> dict[int, dict[int, int]]:
    """By the place of a node, and then by cell, the class that it looks like instead."""
    wrong: dict[int, dict[int, int]] = {}
    enough = (left.index_select(0, columns.node) & (columns.rows >= LEAST_ROWS)).nonzero().flatten()
    for part in enough.split(_CELLS_AT_ONCE) if bool(centres.known.any()) else ():
        means, labels = columns.means(part).double(), columns.labels[part]
        distances = torch.cdist(means, centres.points, compute_mode="donot_use_mm_for_euclid_dist")  # (n, K)
        nearest = torch.where(centres.known, distances, torch.inf).argmin(1)
        suspect = nearest != labels
        if witnesses is not None:
            suspect &= witnesses[part] != labels
        for row in suspect.nonzero().flatten().tolist():
            cell, other = int(part[row]), int(nearest[row])
            witness = None if witnesses is None else int(witnesses[cell])
            far = float(distances[row, other])
            if _is_wrong(means[row], int(labels[row]), (other, far, witness), centres, float(columns.deviation[cell])):
                wrong.setdefault(int(columns.node[cell]), {})[cell] = other
    return wrong


def _is_wrong(
    mean: Tensor, label: int, seen: tuple[int, float, int | None], centres: _Centres, deviation: float
) -> bool:
    """Whether the mean of a cell is clearly of another class: the nearest, its distance, and what the model answers."""
    nearest, distance, witness = seen
    if bool(centres.known[label]):
        towards = centres.points[label] - centres.points[nearest]
        middle = (centres.points[label] + centres.points[nearest]) / 2
        side = float((mean - middle) @ towards / towards.norm().clamp(min=1e-30))
        return side < -_CLEAR * deviation
    # few hold the class, and the model may know it badly: only what lies within another class is mistaken
    return witness is not None and witness == nearest and distance <= _WITHIN * float(centres.radius[nearest])


def weighted_median(points: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The median of points, coordinate by coordinate; no point weighs more than the middle one. (D,)

    >>> weighted_median([torch.tensor([float(n)]) for n in (1, 2, 3, 1e9)], [5.0, 5.0, 5.0, 1e9])
    tensor([2.], dtype=torch.float64)
    """
    return _weighted_median(torch.stack(list(points)).float(), torch.tensor(weights, dtype=torch.float64))


def _weighted_median(points: Tensor, weights: Tensor) -> Tensor:
    """The same, of points in single precision."""
    capped = weights.clamp(max=float(np.median(weights.numpy()))).numpy()
    medians = []
    for part in points.T.split(max(1, _SORTED_AT_ONCE // len(points))):
        order = _order(part.numpy())  # (d, N)
        middle = (capped[order].cumsum(1) >= capped.sum() / 2).argmax(1, keepdims=True)
        medians.append(part.gather(1, torch.from_numpy(np.take_along_axis(order, middle, 1))).flatten())
    return torch.cat(medians).double()


def _order(rows: np.ndarray) -> np.ndarray:
    """The places of each row's numbers, which are of single precision, from the smallest number to the largest.

    Double precision leaves 29 bits of each for its place, and numbers are sorted several times as fast by themselves.
    """
    numbers = rows.astype(np.float64, order="C")
    bits = numbers.view(np.int64)
    bits |= np.arange(rows.shape[1])
    numbers.sort(axis=1)
    return bits & _PLACES
