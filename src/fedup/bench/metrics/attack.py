"""A membership attack on single rows: does a withdrawn row look like an unseen one of its class that is as hard?

How hard a row is, shadow federations say that did not train on it (difficulty calibration, Watson et al. 2022, with the
confidence of LiRA, Carlini et al. 2022). The attack ranks each row's confidence among the unseen rows of its class that
are nearest in difficulty. It is measured where an experiment says `shadow_federations = 16`.
"""

import torch
from torch import Tensor

from fedup.bench.attacks.intervals import auc
from fedup.bench.case import Case, EvaluationData
from fedup.bench.metrics import Column
from fedup.bench.shadow_federations import confidence

_AUC = (
    "Withdrawn rows against unseen rows of the same class and difficulty, held out by clients without withdrawn rows, "
    "by confidence, calibrated by shadow federations: 0.5 is chance. Two models that never saw the rows have their own "
    "figure, the floor: Retrain and a second Retrain."
)
_LOW, _HIGH = "Lower end of its 95 % interval (DeLong), mean over seeds.", "Upper end of it, mean over seeds."
_TWO_SIDED = "The same attack where too low a confidence betrays a row as well as too high a one."
COLUMNS = (
    Column("attack_auc", "attack, AUC", _AUC, "closeness", "retrain", order=38),
    Column("attack_low", "attack, from", _LOW, "closeness", "neither", order=39),
    Column("attack_high", "attack, to", _HIGH, "closeness", "neither", order=40),
    Column("attack_two_sided", "attack, two-sided", _TWO_SIDED, "closeness", "retrain", order=41),
)
_NEIGHBOURS = 10  # unseen rows that a row is ranked among
_FEWEST = 5  # withdrawn rows
_FEWEST_UNSEEN = 10  # of a class


def measure(case: Case) -> dict[str, float | None]:
    """None without shadow federations, and where few rows can be compared."""
    nothing: dict[str, float | None] = {column.key: None for column in COLUMNS}
    data, shadows = case.data, case.data.shadow_federations
    if shadows is None:
        return nothing
    unseen = untouched(data)
    labels = data.labels("forgotten"), data.labels("heldout")[unseen]
    hard = shadows.calibration(data.ids("forgotten")).outside, shadows.calibration(data.ids("heldout")[unseen]).outside
    logits = case.now.logits("forgotten"), case.now.logits("heldout")[unseen]
    ranked = calibrated((confidence(logits[0], labels[0]), confidence(logits[1], labels[1])), labels, hard)
    if ranked is None:
        return nothing
    members, others = (ranks.cpu().numpy() for ranks in ranked)
    figure, low, high = auc(members, others)
    two_sided, _, _ = auc(abs(members - 0.5), abs(others - 0.5))
    return {"attack_auc": figure, "attack_low": low, "attack_high": high, "attack_two_sided": two_sided}


def untouched(data: EvaluationData) -> Tensor:
    """Which held-out rows no answer can have used: those of clients without a forgotten row, which are not asked. Where
    every client has one, all held-out rows. (N,)"""
    federation = data.federation
    forgotten = federation.forgotten(data.request)
    rows = [
        torch.full_like(client.heldout, not bool(torch.isin(client.train, forgotten).any()), dtype=torch.bool)
        for client in federation.clients
    ]
    mask = torch.cat(rows)
    return mask if bool(mask.any()) else ~mask


Pair = tuple[Tensor, Tensor]  # of withdrawn rows, and of unseen rows


def calibrated(sure: Pair, labels: Pair, hard: Pair) -> Pair | None:
    """Each row's rank, 0 to 1, among the unseen rows of its class that are nearest in difficulty; an unseen row is not
    ranked against itself. Classes with few unseen rows are left out; None where few withdrawn rows remain."""
    ranks: tuple[list[Tensor], list[Tensor]] = ([], [])
    for label in labels[0].unique():
        unseen = labels[1] == label
        if int(unseen.sum()) < _FEWEST_UNSEEN:
            continue
        for side, own in enumerate((labels[0] == label, unseen)):
            distance = (hard[side][own][:, None] - hard[1][unseen][None]).abs()
            if side:
                distance.fill_diagonal_(torch.inf)
            count = min(_NEIGHBOURS, int(unseen.sum()) - 1)
            beside = sure[1][unseen][distance.topk(count, largest=False).indices]  # (N, count)
            here = sure[side][own][:, None]
            ranks[side].append(((beside < here).double() + (beside <= here).double()).mean(1) / 2)
    if sum(map(len, ranks[0])) < _FEWEST:
        return None
    return torch.cat(ranks[0]), torch.cat(ranks[1])
