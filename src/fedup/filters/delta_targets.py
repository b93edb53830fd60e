"""What forgotten rows should look like: rows never trained on that are as hard.

A forgotten row is ranked among all trained rows of its client and class, by its own loss and by how badly a linear
model of early features predicts its label from other rows. The unseen row of the class with the same rank among unseen
rows says which loss it should get. Both are ranks among rows of one kind, so it does not matter that trained rows have
smaller losses, and that early features know them better.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedup.errors import CutError, DataError
from fedup.models.features import FEATURE_BATCH, FeatureReader

LEAST_UNSEEN = 3  # of a class: rows of others are compared with unseen rows of all classes together
_RIDGE = 0.1  # of the mean squared length of a row
TYPICAL = 20  # rows of middling hardness that count as forgotten, too: few rows hardly say that they are unusual
_MOST_FEATURES = 4096  # of a row: of more every other, every third, …
_MOST_AT_ONCE = 2000  # forgotten rows whose features are in memory together
_EARLY = 3  # a third of the layers come before the early features


@dataclass(frozen=True, eq=False)
class Losses:
    """Losses of a client's rows under the original model."""

    forgotten: Tensor
    retained: Tensor
    unseen: Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """What forgotten rows should look like, row by row."""

    losses: Tensor
    right: Tensor  # chance of a right answer


def early_layer(layers: list[str]) -> str:
    """The layer whose inputs are early features."""
    return layers[len(layers) // _EARLY]


def unseen_targets(
    losses: Losses,
    labels: Losses,
    right: Tensor,
    hardness: Losses | None = None,
    *,
    typical: int = TYPICAL,
    retained_weight: float = 1.0,
) -> Targets:
    """The losses and the chances of right answers that forgotten rows should get; `labels` and `hardness` (how badly
    other rows predict a label, without it only losses are ranked) are of the same rows, `right` is of unseen rows.
    Retained rows may be a sample: each counts in ranks as `retained_weight` rows."""
    own = torch.cat([losses.forgotten, losses.retained])
    weights = torch.ones_like(own, dtype=torch.float64)
    weights[len(losses.forgotten) :] = retained_weight
    scores, own_labels = ranks(own, own, weights), torch.cat([labels.forgotten, labels.retained])
    if hardness is not None:
        hard = torch.cat([hardness.forgotten, hardness.retained])
        scores = scores + _agreement(hardness.unseen, losses.unseen) * ranks(hard, hard, weights)
    count = len(labels.forgotten)
    unusual = (float(ranks(scores[:count], scores, weights).mean()) - 0.5) * typical / (typical + count)
    targets, chances = torch.empty_like(losses.forgotten), torch.empty_like(losses.forgotten)
    for label in labels.forgotten.unique().tolist():
        rows, trained, unseen = (part == label for part in (labels.forgotten, own_labels, labels.unseen))
        if int(unseen.sum()) < LEAST_UNSEEN:
            trained, unseen = torch.ones_like(trained), torch.ones_like(unseen)
        places = (ranks(scores[:count][rows], scores[trained], weights[trained]) - unusual).clamp(0, 1)
        order = losses.unseen[unseen].argsort(stable=True)
        targets[rows] = _at(losses.unseen[unseen][order], places)
        chances[rows] = _at(right[unseen][order].to(targets), places)
    return Targets(targets, chances)


def ranks(values: Tensor, among: Tensor, weights: Tensor | None = None) -> Tensor:
    """The share of values `among` others that are smaller; of equal ones half. Each may count as several. (N,)"""
    ordered, order = among.sort()
    sides = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    if weights is None or bool((weights == 1).all()):
        return (sides[0] + sides[1]).to(values) / (2 * len(ordered))
    counts = torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])
    return ((counts[sides[0]] + counts[sides[1]]) / (2 * counts[-1])).to(values)


def _at(ordered: Tensor, shares: Tensor) -> Tensor:
    """The values at these shares of the way through an ordered list. (N,)"""
    places = (shares * len(ordered) - 0.5).clamp(0, len(ordered) - 1)
    below = places.floor().long()
    above, share = (below + 1).clamp(max=len(ordered) - 1), places - below
    return ordered[below] * (1 - share) + ordered[above] * share


def _agreement(first: Tensor, second: Tensor) -> float:
    """Rank correlation, where it is positive."""
    if len(first) < LEAST_UNSEEN:
        return 0.0
    both = torch.stack([ranks(own, own) for own in (first, second)])
    return max(0.0, float(torch.corrcoef(both)[0, 1].nan_to_num(0.0)))


@torch.no_grad()
def hardness_of(model: nn.Module, layer: str, x: Tensor, y: Tensor, rows: Losses) -> Losses | None:
    """How badly a ridge regression of the features at a layer predicts each row's label, from the retained and the
    unseen rows but itself; None where the layer gives no features of single rows. `rows` are numbers of rows.

    Of many forgotten rows, features are in memory for a part of them at a time. The first part, every second row or
    every third, …, decides with the known rows how features are standardised.
    """
    try:
        return _hardness(model, layer, x, y, rows)
    except (CutError, DataError):
        return None


def _hardness(model: nn.Module, layer: str, x: Tensor, y: Tensor, rows: Losses) -> Losses | None:
    known = torch.cat([rows.retained, rows.unseen])
    parts = max(1, math.ceil(len(rows.forgotten) / _MOST_AT_ONCE))
    first = rows.forgotten[::parts]
    features = _features(model, layer, x, torch.cat([first, known]))
    scale = features.std(0, keepdim=True) + 1e-3 * features.std() + torch.finfo(features.dtype).tiny
    mean = features.div_(scale)[len(first) :].mean(0)
    own, table = features.sub_(mean).split([len(first), len(known)])
    targets = one_hot(y[known], int(y.max()) + 1).to(table)
    targets = targets - targets.mean(0)
    kernel = table @ table.T
    ridge = _RIDGE * kernel.diagonal().mean()
    if not 0 < float(ridge) < torch.inf:  # features that are all the same, or too large
        return None
    kernel.diagonal().add_(ridge)
    inverse = torch.linalg.inv(kernel)
    weights = inverse @ targets
    left_out = targets - weights / inverse.diagonal()[:, None]  # each row predicted from all others
    retained, unseen = (-_margins(left_out, y[known])).split([len(rows.retained), len(rows.unseen)])
    forgotten = torch.empty(len(rows.forgotten), dtype=table.dtype, device=table.device)
    for start in range(parts):
        numbers = rows.forgotten[start::parts]
        part = _features(model, layer, x, numbers).div_(scale).sub_(mean) if start else own
        forgotten[start::parts] = -_margins(part @ table.T @ weights, y[numbers])
    return Losses(forgotten, retained, unseen)


def _features(model: nn.Module, layer: str, x: Tensor, rows: Tensor) -> Tensor:
    """Features in single precision. (N, D)"""
    parts = (part[layer].flatten(1) for part in FeatureReader(model, layer).batches(x, rows, FEATURE_BATCH))
    return torch.cat([part[:, :: math.ceil(part.shape[1] / _MOST_FEATURES)] for part in parts])


def _margins(scores: Tensor, labels: Tensor) -> Tensor:
    """By how much the score of each row's label is above all others. (N,)"""
    own = one_hot(labels, scores.shape[1]).bool()
    return scores[own] - scores.masked_fill(own, -torch.inf).amax(1)
