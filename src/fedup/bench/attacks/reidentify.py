"""Attack 1: which of m candidates is in a client's data? The server holds the client's message and m feature vectors of
one class, one of them from the client's training rows.

The bound under a guarantee. Fix the client's other records and let Q be the law of the message without the target, P_i
with candidate i in its place. The attack names i on a set A_i of messages, and these sets are disjoint. P_i and Q are
one record apart, so μ-GDP says P_i(A_i) ≤ F(Q(A_i)), where F(α) = Φ(μ + Φ⁻¹(α)) is one minus the trade-off function.
F is concave and rises, and ΣQ(A_i) ≤ 1; by Jensen's inequality candidates that are equally likely are named rightly at
most (1/m)ΣF(Q(A_i)) ≤ F(1/m) = Φ(μ − Φ⁻¹(1 − 1/m)) of the time. No second step of composition (2μ) is needed, because
every P_i is compared with the same Q. Two opposite contributions reach the bound at m = 2: it cannot be improved there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedup.bench.attacks import CENTROIDS, AttackData, Result, fresh, guarantees
from fedup.bench.attacks.intervals import NORMAL, clopper_pearson
from fedup.errors import DataError
from fedup.privacy import DP
from fedup.privacy.dp import Layout, release
from fedup.rng import generator, seed_for
from fedup.tasks.progress import Progress

NEAREST, INFORMED = "re-identification, message only", "re-identification, knowing all other records"
_SHOWN = 50  # trials between two signs of progress


def bound(mu: float, candidates: int) -> float:
    """The most that any attack on a μ-GDP message can reach among that many equally likely candidates.

    >>> round(bound(0.0, 100), 9), round(bound(1.0, 100), 4)
    (0.01, 0.0924)
    """
    return NORMAL.cdf(mu - NORMAL.inv_cdf(1 - 1 / candidates))


@dataclass(frozen=True)
class _Trial:
    """The candidates' rows: the client's own comes first, which the attack does not know."""

    number: int
    client: int
    label: int
    rows: Tensor  # (m,)


def reidentify(
    ground: AttackData, *, trials: int, seed: int = 0, candidates: int = 100, progress: Progress
) -> list[Result]:
    """How often the attack names the right candidate, for each protection; a fresh message in every trial.

    `message only`: it names the candidate nearest to any centroid, or to the released mean of the class. `knowing all
    other records` of the client, and the mechanism, it names the likeliest under a guarantee: no attack does better.
    """
    protected = guarantees()
    found = dict.fromkeys([(NEAREST, name) for name in (*CENTROIDS, *protected)], 0)
    found |= dict.fromkeys([(INFORMED, name) for name in protected], 0)
    some = next(iter(protected.values()))  # statistics before noise do not depend on ε
    points = ground.points(some)
    exact = ground.exact(some, points)
    for trial in _draw(ground, trials, candidates, seed):
        if trial.number % _SHOWN == 0:
            progress("Re-identification", trial.number, trials)
        own = ground.contributions(some, points[trial.rows])
        for name, sigma in CENTROIDS.items():
            near = _nearness(ground, trial, sigma, seed_for(seed, "reidentify", trial.number))
            found[NEAREST, name] += _leads(near)
        held = exact[trial.client][trial.label]
        for name, dp in protected.items():
            message = release(fresh(dp, seed, "reidentify", trial.number), held[None], name=(trial.client,))[0].double()
            found[NEAREST, name] += _leads(_nearness_to_mean(dp, message, own, points.shape[1], ground.num_classes))
            found[INFORMED, name] += _leads(likelihoods(message, held, own))
    progress("Re-identification", trials, trials)
    return [
        _result(attack, name, hits, trials, candidates, protected.get(name)) for (attack, name), hits in found.items()
    ]


def likelihoods(message: Tensor, exact: Tensor, contributions: Tensor) -> Tensor:
    """log P_i/Q of a message for each candidate, times σ²: `exact` holds the first, and all other records. (m,)"""
    known = exact - contributions[0]
    return contributions @ (message - known) - contributions.square().sum(1) / 2


def _nearness_to_mean(dp: DP, message: Tensor, contributions: Tensor, dims: int, num_classes: int) -> Tensor:
    """How close each candidate is to the mean that the message tells of the class."""
    layout = Layout.of(dp, dims, num_classes)
    sums, counts, _ = layout.split(message)
    mean = sums.sum(0) / (counts.sum() / dp.count_weight).clamp(min=1)
    return -(layout.split(contributions)[0].sum(1) - mean).norm(dim=1)


def _nearness(ground: AttackData, trial: _Trial, sigma: float, seed: int) -> Tensor:
    sent = ground.centroids(trial.client, trial.label, sigma=sigma, seed=seed)
    return -torch.cdist(ground.federation.x[trial.rows].double(), sent.double()).amin(1)


def _leads(scores: Tensor) -> bool:
    """Whether the first candidate scores above all others: a tie is no success."""
    return bool(scores[0] > scores[1:].max())


def _draw(ground: AttackData, trials: int, candidates: int, seed: int) -> Iterator[_Trial]:
    """A random training row of a random client each time, among rows of its class that this client did not train on."""
    y, source = ground.federation.y, generator(seed, "reidentify")
    of_class = [(y == label).nonzero().flatten() for label in range(ground.num_classes)]
    rows = torch.cat([client.train for client in ground.federation.clients])
    held = torch.zeros(max(ground.federation.ids) + 1, ground.num_classes, dtype=torch.long)
    held.index_put_((ground.owner[rows], y[rows]), torch.ones_like(rows), accumulate=True)
    rows = rows[y.bincount(minlength=ground.num_classes)[y[rows]] - held[ground.owner[rows], y[rows]] >= candidates - 1]
    if not len(rows):
        raise DataError(f"No class has {candidates} rows to choose from: use fewer candidates, or more data.")
    for number, chosen in enumerate(torch.randint(len(rows), (trials,), generator=source).tolist()):
        target = rows[chosen]
        client, label = int(ground.owner[target]), int(y[target])
        pool = of_class[label][ground.owner[of_class[label]] != client]
        decoys = pool[torch.randperm(len(pool), generator=source)[: candidates - 1]]
        yield _Trial(number, client, label, torch.cat([target[None], decoys]))


def _result(attack: str, protection: str, hits: int, trials: int, candidates: int, dp: DP | None) -> Result:
    low, high = clopper_pearson(hits, trials)
    return Result(
        attack,
        f"found among {candidates}",
        protection,
        hits / trials,
        low,
        high,
        chance=1 / candidates,
        bound=None if dp is None else bound(dp.mu, candidates),
        n=f"{trials} trials",
    )
