"""Calibration error: how far the model's confidence is from its accuracy, on rows that it should still answer."""

import torch
from torch import Tensor

from fedup.bench.case import Case
from fedup.bench.metrics import Column

_BINS = 15  # as usual (Guo et al. 2017)
_ECE = f"Expected calibration error on held-out rows of what is retained: {_BINS} bins of equal width, confidence."
COLUMNS = (Column("ece", "calibration error", _ECE, "closeness", "lower", order=21),)


def measure(case: Case) -> dict[str, float | None]:
    """On held-out rows that are retained; None where there are none."""
    kept = ~case.data.to_forget("heldout")
    return {"ece": calibration_error(case.now.probabilities("heldout")[kept], case.data.labels("heldout")[kept])}


def calibration_error(probabilities: Tensor, labels: Tensor) -> float | None:
    """Mean distance of confidence and accuracy over bins of confidence, weighted by their rows.

    >>> calibration_error(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 0]))  # right, and not quite sure
    0.25
    """
    if not len(labels):
        return None
    confidence, answers = probabilities.double().max(1)
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    less = torch.zeros(_BINS, dtype=torch.float64, device=confidence.device)
    less.index_add_(0, bins, confidence - (answers == labels).double())
    return round(float(less.abs().sum()) / len(labels), 12)
