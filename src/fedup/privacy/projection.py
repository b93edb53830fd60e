"""Fewer dimensions before noise, by a public matrix: noise grows with them, and most carry nothing that is used."""

import torch
from torch import Tensor, nn

from fedup.privacy.guarantee import ProjectionName
from fedup.rng import generator


def basis_of(model: nn.Module, cut: str, width: int, *, how: ProjectionName, dims: int, num_classes: int) -> Tensor:
    """Orthonormal columns (D, d) that features at a cut are projected on; made of the frozen model or of nothing.

    `tail`: what a linear layer at the cut reads. If that is the classifier, differences of logits only, since
    a softmax is blind to the rest: d is the number of classes less one. `random`: that many random directions. `auto`:
    the tail's where there are at most `dims`, else all features if there are so few, else random ones.
    """
    reads = _read_by_tail(model.get_submodule(cut), num_classes) if how in ("auto", "tail") else None
    if reads is not None and (reads.shape[1] <= dims or how == "tail"):
        return reads
    if how == "none" or (how != "random" and width <= dims):
        return torch.eye(width)
    draws = torch.randn(width, min(dims, width), generator=generator(0, "projection", width), dtype=torch.float64)
    return torch.linalg.qr(draws)[0].float()


def _read_by_tail(layer: nn.Module, num_classes: int) -> Tensor | None:
    """An orthonormal basis of the inputs that change what a linear layer says. (D, d)"""
    if not isinstance(layer, nn.Linear):
        return None
    weights = layer.weight.detach().double().cpu()
    if layer.out_features == num_classes:
        weights = weights - weights.mean(0)
    _, sizes, directions = torch.linalg.svd(weights, full_matrices=False)
    return directions[sizes > 1e-6 * sizes[:1]].T.float().contiguous()
