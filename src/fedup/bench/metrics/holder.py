"""What the holder of both models, before and after, can learn: was this row withdrawn?

Whoever has the base and a filter, or two versions of a model, sees how the answer to a row changed (Chen et al. 2021).
The attack ranks the loss of confidence in a row's label among rows of its class of which the base is as sure.
"""

import torch
from torch import Tensor

from fedup.bench.attacks.intervals import auc
from fedup.bench.case import Case, Rows
from fedup.bench.metrics import Column
from fedup.bench.metrics.attack import calibrated, untouched
from fedup.bench.shadow_federations import confidence
from fedup.rng import generator

_UNSEEN = (
    "Withdrawn rows against unseen rows of the same class, by how much less sure the model is after the request, for "
    "whoever holds the model before and after: 0.5 is chance. Retrain has its own figure: a changed model tells."
)
_LOW, _HIGH = "Lower end of its 95 % interval (DeLong), mean over seeds.", "Upper end of it, mean over seeds."
_RETAINED = "The same against retained training rows of the same class."
COLUMNS = (
    Column("holder_auc", "both models, AUC", _UNSEEN, "closeness", "lower", order=42),
    Column("holder_low", "both models, from", _LOW, "closeness", "neither", order=43),
    Column("holder_high", "both models, to", _HIGH, "closeness", "neither", order=44),
    Column("holder_retained", "both models, retained", _RETAINED, "closeness", "lower", order=45),
)
_ROWS = 3000  # of a side, so that all pairs of a class fit into memory


def measure(case: Case) -> dict[str, float | None]:
    """None where few rows can be compared."""
    unseen, retained = _attack(case, "heldout"), _attack(case, "retained")
    figure, low, high = unseen or (None, None, None)
    beside = retained[0] if retained else None
    return {"holder_auc": figure, "holder_low": low, "holder_high": high, "holder_retained": beside}


def _attack(case: Case, others: Rows) -> tuple[float, float, float] | None:
    data = case.data
    usable = untouched(data) if others == "heldout" else torch.ones_like(data.ids(others), dtype=torch.bool)
    chosen = {
        "forgotten": _some(torch.arange(len(data.ids("forgotten"))), "forgotten"),
        others: _some(usable.nonzero().flatten(), others),
    }
    labels = [data.labels(rows)[own] for rows, own in chosen.items()]
    before, after = (
        [confidence(of.logits(rows)[own], label) for (rows, own), label in zip(chosen.items(), labels, strict=True)]
        for of in (case.original, case.now)
    )
    ranked = calibrated((before[0] - after[0], before[1] - after[1]), (labels[0], labels[1]), (before[0], before[1]))
    return auc(*(ranks.cpu().numpy() for ranks in ranked)) if ranked else None


def _some(places: Tensor, rows: Rows) -> Tensor:
    """Some of these places, the same for every method."""
    return places[torch.randperm(len(places), generator=generator(0, "holder", rows))[:_ROWS].to(places.device)]
