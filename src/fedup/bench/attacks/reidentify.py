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

import torch
from torch import Tensor

from fedup.bench.attacks import CENTROIDS, AttackData, Result, guarantees, likelihoods, message_of
from fedup.bench.attacks.intervals import NORMAL, clopper_pearson
from fedup.errors import DataError
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


def reidentify(
    data: AttackData, *, trials: int, seed: int = 0, candidates: int = 100, progress: Progress
) -> list[Result]:
    """How often the attack names the right candidate, for each protection; a fresh message in every trial.

    `message only`: it names the candidate nearest to any centroid, or to the released mean of the class. `knowing all
    other records` of the client, and the mechanism, it names the likeliest under a guarantee: no attack does better.
    """
    protected = guarantees()
    hits = dict.fromkeys([(NEAREST, name) for name in (*CENTROIDS, *protected)], 0)
    hits |= dict.fromkeys([(INFORMED, name) for name in protected], 0)
    some = next(iter(protected.values()))  # statistics before noise do not depend on ε
    points = data.points(some)
    exact = data.exact(some, points)
    for number, (client, label, rows) in enumerate(_draw(data, trials, candidates, seed)):
        if number % _SHOWN == 0:
            progress("Re-identification", number, trials)
        names = ("reidentify", number)
        for name, sigma in CENTROIDS.items():
            near = data.near_centroids(rows, client, label, sigma=sigma, seed=seed_for(seed, *names))
            hits[NEAREST, name] += _leads(near)
        own, held = data.contributions(some, points[rows]), exact[client][label]
        for name, dp in protected.items():
            message = message_of(dp, held, client=client, seed=seed, trial=names)
            hits[NEAREST, name] += _leads(data.near_mean(dp, message, own, points.shape[1]))
            hits[INFORMED, name] += _leads(likelihoods(message, held - own[0], own))
    progress("Re-identification", trials, trials)
    return [
        Result(
            attack,
            f"found among {candidates}",
            name,
            count / trials,
            *clopper_pearson(count, trials),
            chance=1 / candidates,
            bound=bound(protected[name].mu, candidates) if name in protected else None,
            n=f"{trials} trials",
        )
        for (attack, name), count in hits.items()
    ]


def _leads(scores: Tensor) -> bool:
    """Whether the first candidate scores above all others: a tie is no success."""
    return bool(scores[0] > scores[1:].max())


def _draw(data: AttackData, trials: int, candidates: int, seed: int) -> Iterator[tuple[int, int, Tensor]]:
    """A client, a class and rows of it: first a random training row of the client (the attack does not know which it
    is), then others that this client did not train on."""
    y, source = data.federation.y, generator(seed, "reidentify")
    of_class = [(y == label).nonzero().flatten() for label in range(data.num_classes)]
    rows = torch.cat([client.train for client in data.federation.clients])
    held = torch.zeros(max(data.federation.ids) + 1, data.num_classes, dtype=torch.long)
    held.index_put_((data.owner[rows], y[rows]), torch.ones_like(rows), accumulate=True)
    rows = rows[y.bincount(minlength=data.num_classes)[y[rows]] - held[data.owner[rows], y[rows]] >= candidates - 1]
    if not len(rows):
        raise DataError(f"No class has {candidates} rows to choose from: use fewer candidates, or more data.")
    for chosen in torch.randint(len(rows), (trials,), generator=source).tolist():
        target = rows[chosen]
        client, label = int(data.owner[target]), int(y[target])
        pool = of_class[label][data.owner[of_class[label]] != client]
        decoys = pool[torch.randperm(len(pool), generator=source)[: candidates - 1]]
        yield client, label, torch.cat([target[None], decoys])
