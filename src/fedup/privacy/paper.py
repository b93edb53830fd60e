"""The paper's protection of centroids and its accounting: noise only, not a differential-privacy guarantee.

Why it is none: the sensitivity is read off the data without clipping; at ρ = 0.8 most "centroids" are single feature
vectors, though it divides by the class's size; which rows share a centroid depends on the data; δ = 1/n allows
publishing one record; and the formula it uses holds for ε ≤ 1 only. `fedup.privacy.dp` is the guarantee.
"""

import math

import torch
from torch import Tensor

SIGMA = 0.001  # the paper's; 0.01 on CIFAR-100
DISCLAIMER = "noise only, not a DP guarantee"
_ROWS = 2048


def add_noise(vectors: Tensor, sigma: float, source: torch.Generator) -> None:
    """Add the paper's Gaussian noise N(0, σ²I) in place: noise only, not a differential-privacy guarantee."""
    if sigma > 0:
        vectors += sigma * torch.randn(vectors.shape, generator=source).to(vectors)


def paper_epsilon(features: Tensor, sigma: float) -> float:
    """The paper's ε of one (client, class) cell, as printed: √(2 ln(1.25 n))·Δ/σ with Δ = max‖d_p − d_q‖/n.

    >>> round(paper_epsilon(torch.tensor([[0.0], [3.0], [1.0]]), 0.1), 2)
    16.26
    """
    n = len(features)
    if n == 0:
        return 0.0
    parts = features.split(_ROWS)
    exactly = "donot_use_mm_for_euclid_dist"  # small distances would be lost in products of large numbers
    pairs = ((left, right) for i, left in enumerate(parts) for right in parts[i:])
    widest = max(float(torch.cdist(*pair, compute_mode=exactly).max()) for pair in pairs)
    return math.sqrt(2 * math.log(1.25 * n)) * widest / n / sigma
