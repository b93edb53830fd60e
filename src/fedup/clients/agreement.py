"""Which of several nodes' answers disagree with all the others: in length, in rows, or in what their classes look like.

A node is compared with the middle of the nodes, never with their sum: a few of them cannot move it far, whatever they
send. A class of a node counts as mistaken only if two witnesses say so. Its mean is nearer to another class's centre
than to its own, and the last layer, which nobody can change any more, answers another class. One alone is no evidence:
where nodes hold few classes, the model is often wrong on honest rows, and centres of rare classes are uncertain.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

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
_AT_ONCE = 0.1  # share of the suspects that are set aside before the others are judged again

Answers = Callable[[Tensor], Tensor]  # what the last layer answers to features (N, D): classes (N,)


@dataclass(frozen=True, eq=False)
class Profile:
    """What an answer claims of a node's rows."""

    labels: tuple[int, ...]  # of the classes it reports
    rows: Tensor  # (C,) of each; under DP noisy
    means: Tensor  # (C, D) of their features
    length: float  # of its longest row, or the root mean square of all; 0 where nothing is known
    deviation: Tensor  # (C,) of noise on each number of a mean

    @property
    def total(self) -> float:
        """Rows of all classes."""
        return float(self.rows.clamp(min=0).sum())


def too_long(profiles: Mapping[int, Profile], most: float = MOST_LENGTH) -> dict[int, str]:
    """Nodes whose features are far longer than those of the middle node."""
    lengths = {node: profile.length for node, profile in profiles.items() if profile.length > 0}
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
    totals = {node: profile.total - _slack(profile) for node, profile in profiles.items()}
    usual = median(profile.total for profile in profiles.values()) if len(profiles) >= LEAST_NODES else None
    reasons = {}
    for node, total in totals.items():
        if node in declared:
            if total > declared[node] + 0.5:
                reasons[node] = f"it reports {total:,.0f} rows or more, and declared {declared[node]:,}"
        elif usual is not None and total > most * max(usual, 1.0):
            reasons[node] = (
                f"it reports {total / max(usual, 1.0):.3g} times the rows of the middle node, at most {most:g}"
            )
    return reasons


def _slack(profile: Profile) -> float:
    """Rows by which noise may have raised the total."""
    noise = profile.deviation * profile.rows.abs().clamp(min=1)  # of a sum: counts have noise of that order
    return 2 * _CLEAR * float(noise.square().sum().sqrt())


def mistaken(profiles: Mapping[int, Profile], answers: Answers | None, num_classes: int) -> dict[int, str]:
    """Nodes of which much looks like another class than they say.

    The worst are set aside before the others are judged again: what they sent must not make others look wrong.
    """
    left, reasons = dict(profiles), dict[int, str]()
    witnesses = {node: _answered(profile, answers) for node, profile in profiles.items()}
    while len(left) >= LEAST_NODES:
        judged = _judge(left, witnesses, num_classes)
        suspects = {node: own for node, own in judged.items() if own[0] >= 1}
        if not suspects or len(reasons) + 1 > len(profiles) // 2:  # most are right, or nobody knows who is
            break
        worst = sorted(suspects, key=lambda node: (-suspects[node][0], node))
        for node in worst[: max(1, int(_AT_ONCE * len(worst)))]:
            reasons[node] = suspects[node][1]
            del left[node]
    return reasons


def _answered(profile: Profile, answers: Answers | None) -> Tensor | None:
    """What the last layer answers to the mean of each class; None where nobody can say. (C,)"""
    return answers(profile.means) if answers is not None and len(profile.labels) else None


def _judge(
    profiles: Mapping[int, Profile], witnesses: Mapping[int, Tensor | None], num_classes: int
) -> dict[int, tuple[float, str]]:
    """By node, how far it is beyond what is allowed (1 or more: beyond), and why."""
    centres, trusted = _Centres.of(profiles.values(), num_classes), _is_good_witness(profiles, witnesses)
    judged = {}
    for node, profile in profiles.items():
        wrong = _wrong_cells(profile, centres, witnesses[node])
        if not wrong:
            continue
        rows = {profile.labels[i]: float(profile.rows[i]) for i in wrong}
        share = sum(rows.values()) / max(profile.total, 1.0)
        many = {label: n for label, n in rows.items() if n >= _MANY_ROWS and trusted}
        of_class = max((n / float(centres.rows[label]) for label, n in many.items()), default=0.0)
        looks = ", ".join(f"{profile.labels[i]} (like {other})" for i, other in list(wrong.items())[:5])
        seen = "" if witnesses[node] is None else ", and the model agrees"
        why = f"{share:.0%} of its rows look like another class than it says{seen}: class {looks}"
        judged[node] = max(share / MISTAKEN_SHARE, of_class / MISTAKEN_CLASS), why
    return judged


def _is_good_witness(profiles: Mapping[int, Profile], witnesses: Mapping[int, Tensor | None]) -> bool:
    shares = []
    for node, profile in profiles.items():
        answered = witnesses[node]
        if answered is not None and profile.total:
            right = answered == torch.tensor(profile.labels)
            shares.append(float(profile.rows[right].sum()) / profile.total)
    return bool(shares) and median(shares) >= _GOOD_WITNESS


@dataclass(frozen=True, eq=False)
class _Centres:
    """The middle of the nodes' means of each class."""

    points: Tensor  # (K, D)
    known: Tensor  # (K,) whether enough nodes hold the class
    radius: Tensor  # (K,) the middle distance of the nodes' means from it
    rows: Tensor  # (K,) of all nodes

    @classmethod
    def of(cls, profiles: Collection[Profile], num_classes: int) -> "_Centres":
        cells: list[list[tuple[Tensor, float]]] = [[] for _ in range(num_classes)]
        rows = torch.zeros(num_classes, dtype=torch.float64)
        for profile in profiles:
            for label, own, mean in zip(profile.labels, profile.rows.tolist(), profile.means, strict=True):
                rows[label] += max(own, 0.0)
                if own >= LEAST_ROWS:
                    cells[label].append((mean, own))
        points = rows.new_zeros(num_classes, next(profile.means.shape[1] for profile in profiles))
        known, radius = torch.zeros(num_classes, dtype=torch.bool), torch.zeros_like(rows)
        for label, held in enumerate(cells):
            if len(held) >= LEAST_HOLDERS:
                points[label], known[label] = weighted_median(*zip(*held, strict=True)), True
                radius[label] = median(float((mean - points[label]).norm()) for mean, _ in held)
        return cls(points, known, radius, rows)


def _wrong_cells(profile: Profile, centres: _Centres, witness: Tensor | None) -> dict[int, int]:
    """By place among the node's classes, the class that it looks like instead."""
    wrong = {}
    for i in (profile.rows >= LEAST_ROWS).nonzero().flatten().tolist() if bool(centres.known.any()) else ():
        label, mean = profile.labels[i], profile.means[i].double()
        distances = torch.where(centres.known, (centres.points - mean).norm(dim=1), torch.inf)
        nearest = int(distances.argmin())
        if nearest == label or (witness is not None and int(witness[i]) == label):
            continue
        if bool(centres.known[label]):
            towards = centres.points[label] - centres.points[nearest]
            middle = (centres.points[label] + centres.points[nearest]) / 2
            side = float((mean - middle) @ towards / towards.norm().clamp(min=1e-30))
            is_wrong = side < -_CLEAR * float(profile.deviation[i])
        else:  # few hold the class, and the model may know it badly: only what lies within another class is mistaken
            within = float(distances[nearest]) <= _WITHIN * float(centres.radius[nearest])
            is_wrong = witness is not None and int(witness[i]) == nearest and within
        if is_wrong:
            wrong[i] = nearest
    return wrong


def weighted_median(points: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The median of points, coordinate by coordinate; no point weighs more than the middle one. (D,)

    >>> weighted_median([torch.tensor([float(n)]) for n in (1, 2, 3, 1e9)], [5.0, 5.0, 5.0, 1e9])
    tensor([2.], dtype=torch.float64)
    """
    weight = torch.tensor(weights, dtype=torch.float64).clamp(max=median(weights))
    ordered, order = torch.stack(list(points)).double().sort(dim=0)  # (N, D)
    reached = weight[order].cumsum(0) >= weight.sum() / 2
    return ordered.gather(0, reached.int().argmax(0, keepdim=True))[0]
