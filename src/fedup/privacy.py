"""What protects a centroid on its way to the server."""

import torch
from torch import Tensor


def add_noise(vectors: Tensor, sigma: float, source: torch.Generator) -> None:
    """Add the paper's Gaussian noise N(0, σ²I) in place: noise only, not a differential-privacy guarantee."""
    if sigma > 0:
        vectors += sigma * torch.randn(vectors.shape, generator=source).to(vectors)
