"""The eraser: an oblique projection that takes a concept out of features, in closed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedup.errors import DataError
from fedup.filters.bottleneck import Filter
from fedup.models.layout import Granularity, from_positions, known_granularity, to_positions
from fedup.statistics.moments import LEAST_ROWS, GroupStatistics

SHRINKAGE = 1e-3  # least share of the mean variance; more if rows are few per channel
STANDS_OUT = 3.5  # deviations beyond which a token carries the concept


class Eraser(Filter):
    """x − C·Wᵀ(x − μ) at some positions of a cut, x as it is elsewhere.

    After least-squares concept erasure (LEACE, Belrose et al. 2023): each column of C is the difference between the
    mean of forgotten rows and the best mixture of class means of retained rows, W = Σ⁺C(CᵀΣ⁺C)⁺. On the statistics it
    was made of, no linear function of the output is correlated with being forgotten, and no other way to reach that
    moves features less. The mean μ of those mixtures stays (LEACE itself keeps the mean of all rows).
    """

    def __init__(
        self, concept: Tensor, readout: Tensor, offset: Tensor, positions: Tensor, *, granularity: Granularity
    ) -> None:
        super().__init__()
        self.granularity: Granularity = granularity
        self.register_buffer("concept", concept)  # C of each position (K, C, r)
        self.register_buffer("reader", readout)  # W of each position (K, C, r); the name is that of files
        self.register_buffer("offset", offset)  # Wᵀμ (K, r)
        self.register_buffer("positions", positions)  # which ones (K,)

    concept: Tensor
    reader: Tensor
    offset: Tensor
    positions: Tensor

    @property
    def readout(self) -> Tensor:
        """W: reads the concept off features, position by position. (K, C, r)"""
        return self.reader

    @property
    def rank(self) -> int:
        """The number of directions erased at each position."""
        return self.concept.shape[2]

    def forward(self, features: Tensor) -> Tensor:
        kind = torch.promote_types(features.dtype, self.concept.dtype)
        spread = to_positions(features, self.granularity).to(kind)  # (N, P, C)
        chosen = spread.index_select(1, self.positions)
        amount = torch.einsum("nkc,kcr->nkr", chosen, self.readout.to(kind)) - self.offset
        change = torch.einsum("nkr,kcr->nkc", amount.to(kind), self.concept.to(kind))
        erased = spread.index_add(1, self.positions, -change.to(kind))  # autocast may have lowered the precision
        return from_positions(erased, tuple(features.shape[1:])).to(features.dtype)


@dataclass(frozen=True)
class PlacedEraser:
    """An eraser, its cut, and why it sits there."""

    cut: str
    filter: Eraser
    about: Mapping[str, Any]  # plain data for reports


class TokenEraser(Eraser):
    """Replaces tokens that carry a concept by the mean token, at any position.

    In a text the concept sits in few tokens at no fixed position, so the mean over all tokens tells little of it:
    moving those tokens along C would magnify every error of C by the length of a text. But what Wᵀ reads off a token is
    clear. So a token passes unchanged up to `limit`, and is replaced beyond.
    """

    def __init__(self, concept: Tensor, readout: Tensor, offset: Tensor, mean: Tensor, limit: Tensor) -> None:
        first = torch.zeros(1, dtype=torch.long, device=mean.device)
        super().__init__(concept, readout, offset, first, granularity="tokens")
        self.register_buffer("mean", mean)  # of the tokens compared with (C,)
        self.register_buffer("limit", limit)  # of each column (r,)

    mean: Tensor
    limit: Tensor

    def forward(self, features: Tensor) -> Tensor:
        tokens = to_positions(features, "tokens")[:, 0]  # (N · T, C)
        amount = tokens.to(self.concept.dtype) @ self.readout[0] - self.offset[0]  # (N · T, r)
        stands_out = (amount > self.limit).any(1, keepdim=True)
        passed = torch.where(stands_out, self.mean.to(tokens.dtype), tokens)
        return from_positions(passed[:, None], tuple(features.shape[1:]))


def make_eraser(
    groups: GroupStatistics, positions: Sequence[int], *, granularity: Granularity, shrinkage: float = SHRINKAGE
) -> Eraser:
    """The eraser of all groups together, in closed form.

    The covariance is shrunk towards a multiple of the identity, more with fewer rows per channel. That changes the
    direction in which features move, never that the concept is erased.
    """
    pairs = [
        (sums.mean - groups.reference[name].mean, groups.reference[name])
        for name, sums in sorted(groups.forgotten.items())
        if sums.count >= LEAST_ROWS and groups.reference[name].count >= LEAST_ROWS
    ]
    if not pairs:
        raise DataError("There are too few forgotten or retained rows to make an eraser of.")
    concept = torch.stack([difference for difference, _ in pairs], dim=2)  # (K, C, r)
    mean = sum((sums.sums for _, sums in pairs[1:]), pairs[0][1].sums) / sum(sums.count for _, sums in pairs)  # (K, C)
    channels = concept.shape[1]
    covariance = groups.pooled.covariance  # (K, C, C)
    ridge = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)  # (K,)
    ridge = ridge * max(shrinkage, channels / (groups.pooled.count + channels))
    shrunk = covariance + ridge[:, None, None] * torch.eye(channels).to(covariance)
    try:
        solved = torch.linalg.solve(shrunk, concept)  # Σ⁺C
        readout = solved @ torch.linalg.pinv(concept.mT @ solved, hermitian=True)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise DataError("The second moments that clients sent are those of no rows: there is no eraser.") from error
    offset = (readout * mean[:, :, None]).sum(1)
    if not all(bool(weight.isfinite().all()) for weight in (concept, readout, offset)):
        raise DataError("The eraser is not finite: check the features' scale.")
    if granularity == "tokens":
        spread = (readout * (shrunk @ readout)).sum(1).clamp(min=0).sqrt()[0]  # deviation of the readout (r,)
        weights = (concept, readout, offset, mean[0], STANDS_OUT * spread)
        return TokenEraser(*(weight.float() for weight in weights)).eval()
    places = torch.tensor(positions, device=concept.device)
    return Eraser(concept.float(), readout.float(), offset.float(), places, granularity=granularity).eval()


def load_eraser(weights: Mapping[str, Tensor], granularity: str) -> Eraser:
    """An eraser from its stored weights."""
    names, kind = ("concept", "reader", "offset", "positions"), known_granularity(granularity)
    if kind == "tokens":
        return TokenEraser(*(weights[name] for name in (*names[:3], "mean", "limit"))).eval()
    return Eraser(*(weights[name] for name in names), granularity=kind).eval()
