"""Attack 2: was this record in a client's training data? Members are training rows, others held-out rows of the client.

The bound under a guarantee. For one record, the laws of the message with and without it are one record apart, so μ-GDP
allows a test at false-positive rate α a true-positive rate of at most F(α) = Φ(μ + Φ⁻¹(α)). One threshold for many
records mixes such tests, and F is concave, so the mixture obeys it too; the area under F is Φ(μ/√2). This is about the
message alone: the model was trained on the members as well, and what it tells of them by itself no noise on messages
takes away. `no message` is that control.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedup.bench.attacks import CENTROIDS, AttackData, Result, fresh, guarantees
from fedup.bench.attacks.intervals import NORMAL, Scores, auc, tpr_at_fpr
from fedup.errors import DataError
from fedup.privacy import DP
from fedup.privacy.dp import Layout, release
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
class _Asked:
    """Rows that the attack is asked about, whose they may be, and the truth."""

    rows: Tensor  # (n,)
    clients: Tensor
    labels: Tensor
    member: Tensor

    def cells(self) -> list[tuple[int, int]]:
        pairs = torch.stack([self.clients, self.labels], 1).unique(dim=0).tolist()
        return [(client, label) for client, label in pairs]

    def of(self, client: int, label: int) -> Tensor:
        return ((self.clients == client) & (self.labels == label)).nonzero().flatten()


def membership(ground: AttackData, *, trials: int, seed: int = 0, progress: Progress) -> list[Result]:
    """AUC, and members found at 1 % false accusations, for each protection.

    `message only`: nearness to the closest centroid of the record's class, or to its released mean. `knowing all other
    records`: the likelihood ratio of a message made for this record alone, the strongest attack there is.
    """
    asked = _draw(ground, trials, seed)
    features = ground.federation.x[asked.rows].double()
    only = _results(NEAREST, CONTROL, _near_strangers(ground, asked, features), asked, None)
    knowing: list[Result] = []
    work = len(CENTROIDS) + len(guarantees())
    for done, (name, sigma) in enumerate(CENTROIDS.items()):
        progress("Membership", done, work)
        scores = torch.empty(len(asked.rows), dtype=torch.float64)
        for client, label in asked.cells():
            sent = ground.centroids(client, label, sigma=sigma, seed=seed_for(seed, "membership"))
            of_cell = asked.of(client, label)
            scores[of_cell] = -torch.cdist(features[of_cell], sent.double()).amin(1)
        only += _results(NEAREST, name, scores, asked, None)
    for done, (name, dp) in enumerate(guarantees().items(), start=len(CENTROIDS)):
        progress("Membership", done, work)
        nearest, informed = _under_guarantee(ground, dp, asked, seed)
        only += _results(NEAREST, name, nearest, asked, dp)
        knowing += _results(INFORMED, name, informed, asked, dp)
    progress("Membership", work, work)
    return only + knowing


def _under_guarantee(ground: AttackData, dp: DP, asked: _Asked, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of both attacks; a fresh message for each record, so that records are independent trials."""
    points = ground.points(dp)
    exact = ground.exact(dp, points)
    own = ground.contributions(dp, points[asked.rows])
    layout = Layout.of(dp, points.shape[1], ground.num_classes)
    nearest, informed = torch.empty(2, len(asked.rows), dtype=torch.float64)
    for i, (row, client, label) in enumerate(
        zip(asked.rows.tolist(), asked.clients.tolist(), asked.labels.tolist(), strict=True)
    ):
        statistics = exact[client][label]
        message = release(fresh(dp, seed, "membership", row), statistics[None], name=(client,))[0].double()
        known = statistics - own[i] if asked.member[i] else statistics
        informed[i] = own[i] @ (message - known) - own[i].square().sum() / 2
        sums, counts, _ = layout.split(message)
        means = sums / (counts / dp.count_weight).clamp(min=1.0)[:, None]
        point, _, _ = layout.split(own[i])
        nearest[i] = -(point.sum(0) - means).norm(dim=1).min()
    return nearest, informed


def _near_strangers(ground: AttackData, asked: _Asked, features: Tensor) -> Tensor:
    """Nearness to the mean of all other clients' training rows of the class: without any message of the client."""
    scores, y = torch.empty(len(asked.rows), dtype=torch.float64), ground.federation.y
    for client, label in asked.cells():
        strangers = (y == label) & (ground.owner >= 0) & (ground.owner != client)
        if not bool(strangers.any()):
            strangers = y == label
        of_cell = asked.of(client, label)
        scores[of_cell] = -(features[of_cell] - ground.federation.x[strangers].double().mean(0)).norm(dim=1)
    return scores


def _draw(ground: AttackData, trials: int, seed: int) -> _Asked:
    """So many random training rows of all clients, and held-out rows of classes that their client sends; fewer where
    there are no more."""
    y, source = ground.federation.y, generator(seed, "membership")
    parts = []
    for member in (True, False):
        rows, clients = [], []
        for client in ground.federation.clients:
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
    return _Asked(rows_, clients_, y[rows_], member_)


def _results(name: str, protection: str, scores: Tensor, asked: _Asked, dp: DP | None) -> list[Result]:
    members, others = _numbers(scores[asked.member]), _numbers(scores[~asked.member])
    n = f"{len(members)} members, {len(others)} others"
    figures = {
        "AUC": (auc(members, others), 0.5, auc_bound),
        f"TPR at {FPR:.0%} FPR": (tpr_at_fpr(members, others, FPR), FPR, tpr_bound),
    }
    return [
        Result(name, measure, protection, *found, chance=chance, bound=None if dp is None else most(dp.mu), n=n)
        for measure, (found, chance, most) in figures.items()
    ]


def _numbers(scores: Tensor) -> Scores:
    return scores.numpy().astype(np.float64)
