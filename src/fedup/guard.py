"""The guard of dropped classes: points on a forgotten class's side of the feature space, made without its data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedup.rng import generator

_CENTROIDS = 512  # retained centroids that are shifted, for each distance and forgotten class
_SHIFTS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)  # in units of the shift that brings the forgotten class to the top
_SEARCH_STEPS = 8


@dataclass(frozen=True)
class Guard:
    """Feature points at which a forgotten class must not win."""

    points: Tensor  # (G, D)
    forgotten: Tensor  # the forgotten classes

    def draw(self, many: int, source: torch.Generator) -> Tensor:
        """Some of the points, at random."""
        chosen = torch.randint(len(self.points), (many,), generator=source)
        return self.points.index_select(0, chosen.to(self.points.device))

    def loss(self, logits: Tensor) -> Tensor:
        """Mean of −log(1 − p), p the probability of all forgotten classes together."""
        others = logits.index_fill(1, self.forgotten, -torch.inf)
        return (logits.logsumexp(1) - others.logsumexp(1)).mean()


def guard_points(
    tail: Callable[[Tensor], Tensor],
    vectors: Tensor,
    rows: Tensor,
    *,
    forgotten: Sequence[int],
    nonnegative: bool,
    seed: int,
) -> Guard:
    """Retained centroids shifted up the forgotten logit until the frozen tail sees the forgotten class, and beyond.

    The direction is the gradient of (logit f − mean logit), for a linear tail w_f − mean(w), with a random half of its
    coordinates left out so that no single way stays open; points are clipped to the range of the retained centroids.
    A bottleneck that has seen retained centroids only may carry a forgotten class it was never shown once it is trained
    well; these points close that way.
    """
    low, high = vectors.new_full(vectors.shape[1:], torch.inf), vectors.new_full(vectors.shape[1:], -torch.inf)
    for some in rows.split(1024):  # no second array of the store's size
        chosen = vectors.index_select(0, some)
        low, high = torch.minimum(low, chosen.amin(0)), torch.maximum(high, chosen.amax(0))
    low = low.clamp(min=0) if nonnegative else low
    points = []
    for label in forgotten:
        source = generator(seed, "guard", label)
        for shift in _SHIFTS:
            order = torch.randperm(len(rows), generator=source)[:_CENTROIDS].to(rows.device)
            start = vectors.index_select(0, rows[order])  # (C, D)
            direction = _uphill(tail, start, label)
            direction = direction * torch.randint(2, direction.shape, generator=source).to(direction)
            reach = _reach(tail, start, direction, label, low, high)  # (C, 1)
            points.append(torch.clamp(start + shift * reach * direction, low, high))
    return Guard(torch.cat(points), torch.tensor(list(forgotten), device=vectors.device))


def _uphill(tail: Callable[[Tensor], Tensor], start: Tensor, label: int) -> Tensor:
    with torch.enable_grad():
        inputs = start.detach().clone().requires_grad_()
        logits = tail(inputs)
        (gradient,) = torch.autograd.grad((logits[:, label] - logits.mean(1)).sum(), inputs)
    return gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-12)


@torch.no_grad()
def _reach(
    tail: Callable[[Tensor], Tensor], start: Tensor, direction: Tensor, label: int, low: Tensor, high: Tensor
) -> Tensor:
    """How far along the direction the forgotten class comes out on top, by doubling; the last distance where never."""
    distance = start.norm(dim=1, keepdim=True).clamp(min=1e-6) / 8
    for _ in range(_SEARCH_STEPS):
        short = tail(torch.clamp(start + distance * direction, low, high)).argmax(1) != label
        if not bool(short.any()):
            break
        distance = torch.where(short[:, None], distance * 2, distance)
    return distance
