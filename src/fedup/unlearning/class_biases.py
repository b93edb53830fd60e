"""Biases of scores under which no class is answered worse than before, found by what clients count.

Estimates from moments cannot do this: a model knows the rows that it was trained on too well (docs/closed_form.md).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_STEPS = 0.1, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0, 3.0  # tried in each round, in units of the scores' spread
_FULL = 30.0  # points beyond the aim at which a class gets a full step
CountLosses = Callable[[Sequence[Tensor]], Tensor]  # the points that each class loses with each bias; NaN: no row


def solved_biases(count: CountLosses, *, spread: float, num_classes: int, aim: float, rounds: int) -> Tensor:
    """Biases, one for each class, with the least loss of the class that loses most. (K,)

    Each round raises the scores of all classes that lose more points than the `aim`, in proportion to what they lose.
    It goes on from the step with the least excess over all classes, and stops when no class loses too much.
    """
    bias = torch.zeros(num_classes, dtype=torch.float64)
    excess = _excess(count([bias]), aim)[0]  # (K,)
    best, least = bias, float(excess.max())
    for _ in range(rounds):
        if least <= 0:
            break
        direction = spread * excess.clamp(0, _FULL) / _FULL
        tried = [bias + step * direction for step in _STEPS]
        found = _excess(count(tried), aim)  # (V, K)
        chosen = int(found.clamp(min=0).square().sum(1).argmin())
        bias, excess = tried[chosen], found[chosen]
        if float(excess.max()) < least:
            best, least = bias, float(excess.max())
    return best


def _excess(losses: Tensor, aim: float) -> Tensor:
    """Points beyond the aim; none for classes of which nobody counts a row."""
    return torch.where(losses.isnan(), -torch.inf, losses - aim)
