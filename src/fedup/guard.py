"""The guard of dropped classes: a bound on what a filter can say of them, for every input, made without their data."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedup.positions import to_positions
from fedup.rng import generator

_CENTROIDS = 512  # retained centroids at which the tail's slope is taken
_SWEEPS = 100  # at the end of a fit; within it one sweep a step is enough


class Guard:
    """Keeps a filter's decoder from writing towards forgotten classes.

    A bottleneck's output is Σ h_k·D_k with h ≥ 0 (D_k the columns of the decoder), rectified where features cannot be
    negative. Let u point along w_f − mean(w_j over retained j); for a tail that is not linear, along the mean gradient
    of that difference of logits. A column with

        Σ_{u_i>0} u_i·max(D_ik, 0) + Σ_{u_i<0} u_i·D_ik ≤ 0        (not rectified: u·D_k ≤ 0)

    can only lower the forgotten logit against the mean retained one. So with a linear tail *no input at all* lifts the
    forgotten logit above that mean, the difference of their biases aside. Training longer cannot undo this, as it
    undoes losses on sample points, because the columns are projected back after every step.
    """

    def __init__(self, directions: Tensor, *, nonnegative: bool) -> None:
        self._directions = directions  # (F, D) unit vectors
        self._nonnegative = nonnegative

    @classmethod
    def against(
        cls,
        forgotten: Sequence[int],
        *,
        tail: Callable[[Tensor], Tensor],
        vectors: Tensor,
        rows: Tensor,
        nonnegative: bool,
        seed: int,
        shape: tuple[int, ...] = (),
    ) -> "Guard":
        """A guard against these classes, from the frozen tail and retained centroids alone.

        A filter that acts on each position of a row of that `shape` is held to the bound at every position.
        """
        order = torch.randperm(len(rows), generator=generator(seed, "guard"))[:_CENTROIDS].to(rows.device)
        with torch.enable_grad():
            inputs = vectors.index_select(0, rows[order]).detach().requires_grad_()  # (C, D)
            logits = tail(inputs)
            retained = [label for label in range(logits.shape[1]) if label not in forgotten]
            heights = [(logits[:, label] - logits[:, retained].mean(1)).sum() for label in forgotten]
            slopes = [torch.autograd.grad(height, inputs, retain_graph=True)[0].mean(0) for height in heights]
        directions = torch.stack(slopes)  # (F, D)
        if shape:
            directions = to_positions(directions.reshape(-1, *shape)).flatten(0, 1)  # (F · P, C)
        return cls(directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-12), nonnegative=nonnegative)

    @torch.no_grad()
    def excess(self, decoder: Tensor) -> Tensor:
        """How far each column is beyond each bound: nowhere above 0 when the guard holds. (F, rank)"""
        return torch.stack([(self._slope(u, decoder) * decoder).sum(0) for u in self._directions])

    @torch.no_grad()
    def enforce(self, decoder: Tensor) -> None:
        """Move the columns towards the bounds, in place, by the shortest way for each forgotten class in turn."""
        for u in self._directions:
            slope = self._slope(u, decoder)
            beyond = (slope * decoder).sum(0).clamp(min=0)
            decoder.sub_(slope * (beyond / slope.square().sum(0).clamp(min=1e-12)))

    def finish(self, decoder: Tensor) -> None:
        """Enforce until every column holds to rounding."""
        for _ in range(_SWEEPS):
            self.enforce(decoder)
            if float(self.excess(decoder).max()) <= 1e-6 * float(decoder.norm(dim=0).max()):
                return

    def _slope(self, u: Tensor, decoder: Tensor) -> Tensor:
        """The bound's subgradient at each column. (D, rank)"""
        slope = u[:, None].expand_as(decoder)
        return torch.where((slope < 0) | (decoder > 0), slope, 0) if self._nonnegative else slope
