"""A public projection to fewer dimensions before noise: noise grows with them, and most are not used."""

import torch
from torch import Tensor, nn

from fedup.errors import CutError
from fedup.models.cut import find_cut
from fedup.privacy.guarantee import ProjectionName
from fedup.rng import generator


def basis_of(model: nn.Module, cut: str, width: int, *, how: ProjectionName, dims: int, num_classes: int) -> Tensor:
    """Orthonormal columns (D, d) that features at a cut are projected on; they depend on no data.

    `tail`: what a linear layer at the cut reads. If that is the classifier, only differences of logits, since a softmax
    ignores the rest: d is the number of classes less one. `random`: `dims` random directions. `auto`: the tail's if
    at most `dims`, else all features if at most `dims`, else random ones.
    """
    reads = _read_by_tail(model, cut, width, num_classes) if how in ("auto", "tail") else None
    if reads is not None and (reads.shape[1] <= dims or how == "tail"):
        return reads
    if how == "none" or (how != "random" and width <= dims):
        return torch.eye(width)
    draws = torch.randn(width, min(dims, width), generator=generator(0, "projection", width), dtype=torch.float64)
    return torch.linalg.qr(draws)[0].float()


def _read_by_tail(model: nn.Module, cut: str, width: int, num_classes: int) -> Tensor | None:
    """An orthonormal basis of the inputs that change what a linear layer says. (D, d)"""
    layer = model.get_submodule(cut)
    if not isinstance(layer, nn.Linear) or layer.in_features != width:  # it acts on positions or tokens
        return None
    weights = layer.weight.detach().double().cpu()
    if layer.out_features == num_classes and cut == find_cut(model):
        weights = weights - weights.mean(0)
    _, sizes, directions = torch.linalg.svd(weights, full_matrices=False)
    kept = directions[sizes > 1e-6 * sizes[:1].clamp(min=1e-300)]  # (d, D)
    if not len(kept):
        raise CutError("The layer at the cut says the same of every input: there is nothing to release or to filter.")
    largest = kept.gather(1, kept.abs().argmax(1, keepdim=True))
    return (kept * largest.sign()).T.float().contiguous()  # a fixed sign, whatever the library's choice
