"""The mixture of groups that comes closest to the mean of forgotten rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STEPS = 400
_REWEIGHTINGS = 8
_FAR = 1.5  # times the median distance


def mixture(mean: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Weights of the mixture of references that comes closest to a mean: none negative, 1 together.

    Forgotten and retained rows rarely have the same proportions of classes (the label of a poisoned row says nothing of
    its content). The difference from the mixture is what only forgotten rows have.

    >>> corners = [torch.tensor([0.0, 0.0]), torch.tensor([4.0, 0.0])]
    >>> torch.allclose(mixture(torch.tensor([1.0, 3.0]), corners), torch.tensor([0.75, 0.25]).double())
    True
    """
    centre = mean.flatten()
    table = torch.stack([reference.flatten() - centre for reference in references])  # (K, D)
    gram = (table @ table.T).cpu().numpy()
    step = 1 / max(float(np.linalg.norm(gram, 2)), 1e-12)
    weights = ahead = np.full(len(references), 1 / len(references))
    pace = 1.0
    for _ in range(_STEPS):  # projected gradient with momentum (Beck & Teboulle 2009)
        before, weights = weights, _onto_simplex(ahead - step * (gram @ ahead))
        faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead = weights + (pace - 1) / faster * (weights - before)
        pace = faster
    return torch.from_numpy(weights)


def robust_mixture(mean: Tensor, references: Sequence[Tensor]) -> Tensor:
    """The same for means (G, S) that lie far apart in a few of their G groups: what only forgotten rows have (a patch
    in a corner) must not choose the mixture. Groups far above the median distance count less (Huber 1964, by
    reweighting)."""
    weights = mixture(mean, references)
    for _ in range(_REWEIGHTINGS):
        distances = (mean - mixed(references, weights)).norm(dim=1)
        median = distances.median().clamp(min=1e-12)
        scale = (_FAR * median / distances.clamp(min=1e-12)).clamp(max=1).sqrt()[:, None]
        weights = mixture(scale * mean, [scale * reference for reference in references])
    return weights


def _onto_simplex(values: np.ndarray) -> np.ndarray:
    """The nearest weights that are not negative and sum to 1 (Duchi et al. 2008)."""
    ordered = np.sort(values)[::-1]
    beyond = (ordered.cumsum() - 1) / np.arange(1, len(values) + 1)
    return np.maximum(values - beyond[int((ordered > beyond).sum()) - 1], 0)


def mixed(means: Sequence[Tensor], weights: Tensor) -> Tensor:
    """The mean of a mixture."""
    return torch.einsum("k,k...->...", weights.to(means[0]), torch.stack(list(means)))
