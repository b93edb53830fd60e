"""The guard against dropped classes: a bound on a filter that holds for every input, made without their data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedup.rng import generator

_CENTROIDS = 512  # retained centroids at which the tail's slope is taken
_SWEEPS = 100  # at the end of a fit; within it one sweep a step is enough
_MARGIN = 1e-3  # of logits: a forgotten class stays below by this


@dataclass(frozen=True, eq=False)
class Guard:
    """Keeps a filter's decoder from writing towards forgotten classes.

    A bottleneck's output is Σ h_k·D_k with h ≥ 0 (D_k the columns of the decoder), rectified where features cannot be
    negative. Let u point along w_f − mean(w_j over retained j); for a tail that is not linear, along the mean gradient
    of that difference of logits. A column with

        Σ_{u_i>0} u_i·max(D_ik, 0) + Σ_{u_i<0} u_i·D_ik ≤ 0        (not rectified: u·D_k ≤ 0)

    can only lower the forgotten logit against the mean retained one. What remains is the lead by bias that a forgotten
    class has when nothing passes. Against it the filter adds a constant c to its output, with u·c far enough below 0
    (and c ≥ 0 if the output is rectified, which keeps the bound). So with a linear tail *no input at all* lifts the
    forgotten logit above that mean. Longer training cannot undo this: columns are projected back after every step.
    """

    directions: Tensor  # (F, D) unit vectors
    nonnegative: bool
    slopes: Tensor  # (F, D) change of each lead per unit of a constant output
    leads: Tensor  # (F,) of forgotten logits over the mean retained one, when nothing passes

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
    ) -> "Guard":
        """A guard against these classes, from the frozen tail and retained centroids alone."""
        order = torch.randperm(len(rows), generator=generator(seed, "guard"))[:_CENTROIDS].to(rows.device)
        with torch.enable_grad():
            inputs = vectors.index_select(0, rows[order]).detach().requires_grad_()  # (C, D)
            leads = _leads(tail(inputs), forgotten)  # (C, F)
            gradients = (torch.autograd.grad(lead.sum(), inputs, retain_graph=True)[0] for lead in leads.T)
            slopes = torch.stack([gradient.mean(0) for gradient in gradients])  # (F, D)
        with torch.no_grad():
            at_zero = _leads(tail(torch.zeros_like(inputs[:1])), forgotten)[0]
        directions = slopes / slopes.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return cls(directions, nonnegative, slopes, at_zero)

    @torch.no_grad()
    def constant(self) -> Tensor | None:
        """The constant output that keeps forgotten classes from leading by their bias; None if none leads."""
        beyond = self.leads + _MARGIN * (1 + self.leads.abs())
        if not bool((beyond > 0).any()):
            return None
        added = best = torch.zeros_like(self.slopes[0])
        for _ in range(_SWEEPS):
            for slope, lead in zip(self.slopes, beyond, strict=True):
                missing = (slope @ added + lead).clamp(min=0)
                way = torch.where((slope < 0) | (added > 0), slope, 0) if self.nonnegative else slope
                added = added - way * missing / way.square().sum().clamp(min=1e-12)
                added = added.clamp(min=0) if self.nonnegative else added
            if self._lead(added) < self._lead(best):
                best = added
            if self._lead(best) < 0:
                break
        return best if self._lead(best) < self._lead(torch.zeros_like(best)) else None

    def _lead(self, added: Tensor) -> float:
        """The largest lead of a forgotten class when only this constant passes."""
        return float((self.slopes @ added + self.leads).max())

    @torch.no_grad()
    def excess(self, decoder: Tensor) -> Tensor:
        """How far each column exceeds each bound: never above 0 when the guard holds. (F, rank)"""
        return torch.stack([(self._slope(u, decoder) * decoder).sum(0) for u in self.directions])

    @torch.no_grad()
    def enforce(self, decoder: Tensor) -> None:
        """Move columns in place to each bound in turn, by the shortest way."""
        for u in self.directions:
            slope = self._slope(u, decoder)
            beyond = (slope * decoder).sum(0).clamp(min=0)
            decoder.sub_(slope * (beyond / slope.square().sum(0).clamp(min=1e-12)))

    def finish(self, decoder: Tensor) -> None:
        """Enforce until every column is within the bounds, up to rounding."""
        for _ in range(_SWEEPS):
            self.enforce(decoder)
            if float(self.excess(decoder).max()) <= 1e-6 * float(decoder.norm(dim=0).max()):
                return

    def _slope(self, u: Tensor, decoder: Tensor) -> Tensor:
        """The bound's subgradient at each column. (D, rank)"""
        slope = u[:, None].expand_as(decoder)
        return torch.where((slope < 0) | (decoder > 0), slope, 0) if self.nonnegative else slope


def _leads(logits: Tensor, forgotten: Sequence[int]) -> Tensor:
    """How far each forgotten logit is above the mean retained one. (N, F)"""
    retained = [label for label in range(logits.shape[1]) if label not in forgotten]
    return logits[:, list(forgotten)] - logits[:, retained].mean(1, keepdim=True)
