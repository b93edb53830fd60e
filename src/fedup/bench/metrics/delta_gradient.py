"""What the holder of a delta can learn from its direction: does it point where a row's own loss rises?

A delta raises the losses of withdrawn rows, so it is made of their gradients. The attack ranks the cosine between the
delta and the gradient of a row's loss at the base among rows of its class of which the base is as sure.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedup.bench.attacks.intervals import auc
from fedup.bench.case import Case, Rows
from fedup.bench.metrics import Column
from fedup.bench.metrics.attack import calibrated, untouched
from fedup.bench.shadow_federations import confidence
from fedup.filters.delta import changed_weights
from fedup.models.cut import logits_of
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel

_UNSEEN = (
    "Withdrawn rows against unseen rows of the same class, for whoever holds base and delta, by the cosine between the "
    "delta and the gradient of the row's loss: 0.5 is chance. Of deltas only."
)
_RETAINED = "The same against retained training rows of the same class."
COLUMNS = (
    Column("delta_gradient", "delta's gradient, AUC", _UNSEEN, "closeness", "lower", order=46),
    Column("delta_gradient_retained", "delta's gradient, retained", _RETAINED, "closeness", "lower", order=47),
    Column(
        "delta_bytes", "delta", "Bytes of the changes of weights that clients send.", "cost", "lower", "bytes", order=34
    ),
)
_ROWS = 400  # of a side: each takes a backward pass of its own


def measure(case: Case) -> dict[str, float | None]:
    """None for models without a delta, and where few rows can be compared."""
    model = case.now.model
    nothing: dict[str, float | None] = {column.key: None for column in COLUMNS}
    if not isinstance(model, PluggedModel) or model.served is None or model.served.delta is None:
        return nothing
    total = model.served.delta.total
    if not total:  # of rows that look unseen already
        return nothing
    change = {weight.name: weight.whole(total[weight.name]) for weight in changed_weights(model.base, model.cut)}
    return {
        "delta_bytes": model.served.delta.size_bytes,
        "delta_gradient": _attack(case, change, "heldout"),
        "delta_gradient_retained": _attack(case, change, "retained"),
    }


def _attack(case: Case, change: dict[str, Tensor], others: Rows) -> float | None:
    data = case.data
    usable = untouched(data) if others == "heldout" else torch.ones_like(data.ids(others), dtype=torch.bool)
    places_of: dict[Rows, Tensor] = {
        "forgotten": torch.arange(len(data.ids("forgotten"))),
        others: usable.nonzero().flatten(),
    }
    sides = []
    for rows, places in places_of.items():
        order = torch.randperm(len(places), generator=generator(0, "delta's gradient", rows))
        own = places[order[:_ROWS].to(places.device)]
        labels = data.labels(rows)[own]
        aligned = alignment(case.original.model, change, data.federation.x[data.ids(rows)[own]], labels)
        sides.append((aligned, labels, confidence(case.original.logits(rows)[own], labels)))
    withdrawn, beside = sides
    ranked = calibrated((withdrawn[0], beside[0]), (withdrawn[1], beside[1]), (withdrawn[2], beside[2]))
    return auc(*(ranks.cpu().numpy() for ranks in ranked))[0] if ranked else None


def alignment(model: nn.Module, change: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The cosine between a change of weights and the gradient of each row's loss. (N,)"""
    weights = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in change}
    direction = torch.cat([change[name].to(x.device).flatten() for name in weights]).double()
    cosines = []
    with torch.enable_grad():
        for row, label in zip(x.split(1), y.long().split(1), strict=True):
            loss = cross_entropy(logits_of(functional_call(model, weights, (row,))), label)
            gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(weights.values()))])
            cosines.append(torch.cosine_similarity(gradient.double(), direction, dim=0))
    return torch.stack(cosines)
