"""A last layer in closed form: ridge regression and a scale for its softmax, by one fixed rule from totals alone."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedup.errors import DataError, SettingError
from fedup.filters.closed_form import Scores, without_classes
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig

_CLOSE = 1e-4  # of the largest weight: other libraries and threads round otherwise
_LEAST_SHARE = 0.2  # of the sharpness, where there are hardly more rows than features


@dataclass(frozen=True)
class HeadRule:
    """How totals become a head; part of the configuration, so it is fixed before any client is asked.

    The ridge is (`ridge` + `few_rows` · features / rows) times the mean variance of a feature. `sharpness` scales the
    scores: 1 is right for Gaussian classes, and rows that the head was not learned from are farther off. The defaults
    were fixed on digits and MNIST, seeds from 100 (`tools/tune_exact_ridge.py`): close to the best of its grid, and the
    ridge of the closed form where rows are many.
    """

    ridge: float = 0.01
    few_rows: float = 0.1
    sharpness: float = 0.25

    def __post_init__(self) -> None:
        if not (self.ridge > 0 and self.few_rows >= 0 and self.sharpness > 0):
            raise SettingError(f"ridge and sharpness are positive, few_rows is not negative; found {self}.")


class RidgeHead(nn.Module):
    """Scores of features, one for each class. Rows longer than the bound are shortened to it, as in the sums."""

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int, num_classes: int, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.register_buffer("weight", torch.zeros(num_classes, width))
        self.register_buffer("bias", torch.zeros(num_classes))

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1).to(self.weight.dtype)
        return linear(
            flat * (self.bound / flat.norm(dim=1, keepdim=True).clamp(min=self.bound)), self.weight, self.bias
        )

    def fits(self, scores: Scores) -> bool:
        """Whether these scores are the head's own, up to rounding."""
        size = float(scores.weight.abs().max())
        limits = _CLOSE * size, _CLOSE * (size + float(scores.bias.abs().max()))
        pairs = zip((self.weight, self.bias), (scores.weight, scores.bias), limits, strict=True)
        return all(
            own.shape == other.shape and torch.allclose(own.double(), other.to(own.device).double(), rtol=0, atol=limit)
            for own, other, limit in pairs
        )

    def put(self, scores: Scores) -> None:
        """Take other scores in place of the ones so far."""
        self.weight.copy_(scores.weight)
        self.bias.copy_(scores.bias)


def solve_head(totals: IntegerMoments, config: MomentConfig, rule: HeadRule) -> Scores:
    """The scores that totals give; a class without rows is never answered."""
    rows = totals.rows
    if not rows:
        raise DataError("No retained row is left to learn a head from.")
    counts = totals.counts.double()
    shares, means = counts / rows, totals.sums.double() * config.step / counts.clamp(min=1)[:, None]  # (K,), (K, D)
    mean = shares @ means
    second = totals.lower_second().mul_(config.step**2 / rows)  # lower triangles do: everything is symmetric
    damped = second.addr(mean, mean, alpha=-1)
    ridge = (rule.ridge + rule.few_rows * len(damped) / rows) * float(damped.diagonal().mean().clamp(min=1e-12))
    damped.diagonal().add_(ridge)
    factor, info = torch.linalg.cholesky_ex(damped)
    if int(info):
        raise DataError("The totals give no head: their covariance is not positive. Learn the head again.")
    weight = torch.cholesky_solve((shares[:, None] * (means - mean)).T, factor).T  # (K, D)
    sharpness = rule.sharpness * max(_LEAST_SHARE, 1 - len(mean) / rows)
    scale = _scale(weight, shares, means, second, sharpness)
    scores = Scores(scale * weight, scale * (shares - weight @ mean))
    return without_classes(scores, totals.counts == 0)


def _scale(weight: Tensor, shares: Tensor, means: Tensor, second: Tensor, sharpness: float) -> float:
    """By what to multiply scores, so that their softmax is about as sure as it is right.

    The lead of the right class over the mean of the others has mean m and variance v within classes. If it is Gaussian,
    2 m / v is the best scale. `second` has the lower triangle of E[x xᵀ].
    """
    held = shares > 0
    mean = shares @ means
    own, shares, centres = weight[held], shares[held], means[held] - mean
    if len(own) < 2:
        return 1.0
    leads = own - (own.sum(0) - own) / (len(own) - 1)  # (K', D)
    of_classes = (leads @ centres.T).square() @ shares  # between classes, which is no spread within them
    squares = 2 * ((leads @ second) * leads).sum(1) - leads.square() @ second.diagonal()  # E[(lead · x)²]
    variance = squares - (leads @ mean).square() - of_classes
    lead, spread = float(shares @ (leads * centres).sum(1)), float(shares @ variance.clamp(min=0))
    return 2 * sharpness * lead / max(spread, 1e-6 * lead**2, 1e-300) if lead > 0 else 1.0
