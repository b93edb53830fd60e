"""Attack 2: was this record in a client's training data? Members are training rows, others held-out rows of the client.

The bound under a guarantee. For one record, the laws of the message with and without it are one record apart, so μ-GDP
allows a test at false-positive rate α a true-positive rate of at most F(α) = Φ(μ + Φ⁻¹(α)). One threshold for many
records mixes such tests, and F is concave, so the mixture obeys it too; the area under F is Φ(μ/√2). This is about the
message alone: the model was trained on the members as well, and what it tells of them by itself no noise on messages
takes away. `no message` is that control.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedup.bench.attacks import CENTROIDS, AttackData, Result, guarantees, likelihoods, message_of, shown
from fedup.bench.attacks.intervals import NORMAL, auc, tpr_at_fpr
from fedup.errors import DataError
from fedup.privacy import DP
from fedup.rng import generator, seed_for
from fedup.tasks.progress import Progress

NEAREST, INFORMED = "membership, message only", "membership, knowing all other records"
CONTROL = "no message (control)"
FPR = 0.01


def auc_bound(mu: float) -> float:
    """The largest area under the curve that μ-GDP allows."""
    return NORMAL.cdf(mu / math.sqrt(2))


def tpr_bound(mu: float, fpr: float = FPR) -> float:
    """The largest true-positive rate that μ-GDP allows at that false-positive rate."""
    return NORMAL.cdf(mu + NORMAL.inv_cdf(fpr))


@dataclass(frozen=True)
class _Records:
    """Rows that the attack is asked about, whose they may be, and the truth."""

    rows: Tensor  # (n,)
    clients: Tensor
    labels: Tensor
    member: Tensor

    def by_cell(self, score: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Scores of all rows, made of those of each client and class together. (n,)"""
        scores = torch.empty(len(self.rows), dtype=torch.float64)
        for client, label in torch.stack([self.clients, self.labels], 1).unique(dim=0).tolist():
            of_cell = (self.clients == client) & (self.labels == label)
            scores[of_cell] = score(self.rows[of_cell], client, label)
        return scores


def membership(data: AttackData, *, trials: int, seed: int = 0, progress: Progress) -> list[Result]:
    """AUC, and members found at 1 % false accusations, for each protection.

    `message only`: nearness to the closest centroid of the record's class, or to its released mean. `knowing all other
    records`: the likelihood ratio of a message made for this record alone, the strongest attack there is.
    """
    records = _draw(data, trials, seed)
    only = _results(NEAREST, CONTROL, _near_strangers(data, records), records, None)
    knowing: list[Result] = []
    protections: dict[str, float | DP] = {**CENTROIDS, **guarantees()}
    for name, protection in shown(protections.items(), "Membership", progress):
        if isinstance(protection, DP):
            nearest, informed = _under_guarantee(data, protection, records, seed)
            only += _results(NEAREST, name, nearest, records, protection)
            knowing += _results(INFORMED, name, informed, records, protection)
        else:
            near = partial(data.near_centroids, sigma=protection, seed=seed_for(seed, "membership"))
            only += _results(NEAREST, name, records.by_cell(near), records, None)
    return only + knowing


def _under_guarantee(data: AttackData, dp: DP, records: _Records, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of both attacks; a fresh message for each record, so that records are independent trials."""
    points = data.points(dp)
    exact = data.exact(dp, points)
    contributions = data.contributions(dp, points[records.rows])
    nearest, informed = torch.empty(2, len(records.rows), dtype=torch.float64)
    columns = (records.rows, records.clients, records.labels, records.member)
    for i, (row, client, label, member) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        held, own = exact[client][label], contributions[i : i + 1]
        message = message_of(dp, held, client=client, seed=seed, trial=("membership", row))
        informed[i] = likelihoods(message, held - own[0] if member else held, own)[0]
        nearest[i] = data.near_mean(dp, message, own, points.shape[1])[0]
    return nearest, informed


def _near_strangers(data: AttackData, records: _Records) -> Tensor:
    """Nearness to the mean of all other clients' training rows of the class: without any message of the client."""
    x, y = data.federation.x, data.federation.y

    def near(rows: Tensor, client: int, label: int) -> Tensor:
        strangers = (y == label) & (data.owner >= 0) & (data.owner != client)
        strangers = strangers if bool(strangers.any()) else y == label
        return -(x[rows].double() - x[strangers].double().mean(0)).norm(dim=1)

    return records.by_cell(near)


def _draw(data: AttackData, trials: int, seed: int) -> _Records:
    """Random training rows of all clients, and held-out rows of classes that their client sends: `trials` of each, or
    all there are."""
    y, source = data.federation.y, generator(seed, "membership")
    parts = []
    for member in (True, False):
        rows, clients = [], []
        for client in data.federation.clients:
            own = client.train if member else client.heldout
            own = own[torch.isin(y[own], y[client.train])]
            rows.append(own)
            clients.append(torch.full_like(own, client.id))
        together, whose = torch.cat(rows), torch.cat(clients)
        chosen = torch.randperm(len(together), generator=source)[:trials]
        parts.append((together[chosen], whose[chosen], torch.full((len(chosen),), member)))
    rows_, clients_, member_ = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    if not bool(member_.any()) or bool(member_.all()):
        raise DataError("Membership needs training rows and held-out rows; one kind is missing.")
    return _Records(rows_, clients_, y[rows_], member_)


def _results(name: str, protection: str, scores: Tensor, records: _Records, dp: DP | None) -> list[Result]:
    members, others = (scores[chosen].numpy().astype(np.float64) for chosen in (records.member, ~records.member))
    figures = {
        "AUC": (auc(members, others), 0.5, auc_bound),
        f"TPR at {FPR:.0%} FPR": (tpr_at_fpr(members, others, FPR), FPR, tpr_bound),
    }
    n = f"{len(members)} members, {len(others)} others"
    return [
        Result(name, measure, protection, *interval, chance=chance, bound=None if dp is None else most(dp.mu), n=n)
        for measure, (interval, chance, most) in figures.items()
    ]
