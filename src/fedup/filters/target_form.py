"""The closed form for labels and values: ridge regression from moments of features and targets together."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedup.errors import CutError, DataError
from fedup.filters.closed_form import (
    MARGIN,
    SHARPNESS,
    ClosedForm,
    Scores,
    largest_rounding,
    ridge_solution,
    written_into,
)
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig


@dataclass(frozen=True, eq=False)
class TargetStatistics:
    """What the moments of retained rows say of features x and targets t, in their own units."""

    rows: int
    mean: Tensor  # (D,)
    covariance: Tensor  # (D, D)
    target_mean: Tensor  # (K,)
    cross: Tensor  # (K, D) covariance of targets and features
    target_variance: Tensor  # (K,)

    @classmethod
    def of(cls, moments: IntegerMoments, config: MomentConfig) -> "TargetStatistics":
        """Of the moments of retained rows."""
        if not moments.rows:
            raise DataError("No retained row is left to make a filter from.")
        inputs = moments.width - config.outputs
        units = torch.full((moments.width,), config.step, dtype=torch.float64)
        units[inputs:] = config.value_step
        mean = moments.sums.sum(0).double() / moments.rows * units
        joint = moments.dense_second() / moments.rows * torch.outer(units, units) - torch.outer(mean, mean)
        return cls(
            moments.rows,
            mean[:inputs],
            joint[:inputs, :inputs],
            mean[inputs:],
            joint[inputs:, :inputs],
            joint.diagonal()[inputs:].clamp(min=0),
        )

    @property
    def deviations(self) -> Tensor:
        """Of each target; 1 for one that is constant. (K,)"""
        return torch.where(self.target_variance > 1e-12, self.target_variance.sqrt(), 1.0)

    def means_given(self, label: int) -> tuple[Tensor, Tensor]:
        """The mean features of rows with a label and of those without it. (D,) each"""
        share, cross = self.target_mean[label], self.cross[label]
        return self.mean + cross / share, self.mean - cross / (1 - share)

    def spread(self, scores: Scores) -> Tensor:
        """The deviation of each score over retained rows. (K,)"""
        return ((scores.weight @ self.covariance) * scores.weight).sum(1).clamp(min=0).sqrt()


def target_scores(retained: TargetStatistics) -> Scores:
    """Scores fitted to the targets by ridge regression: A = Cov(t, x) (Σ + λI)⁻¹, a = E t − A E x.

    With one-hot labels these are the ridge scores of classes.
    """
    weight = ridge_solution(retained.covariance, retained.cross, retained.rows)
    return Scores(weight, retained.target_mean - weight @ retained.mean)


def label_scores(retained: TargetStatistics, head: Scores, *, balanced: bool = False) -> Scores:
    """Scores of labels that say yes above 0.

    Of each label the threshold lies where, for Gaussian scores with and without it, both are as likely; `balanced`
    takes both to be as frequent. The slope gives the score 0.7 of the spread that the original layer's has, as for
    classes. A label that all retained rows have, or none has, is constant.
    """
    fitted = target_scores(retained)
    weight, bias = fitted.weight.clone(), fitted.bias.clone()
    wanted, own = retained.spread(head), retained.spread(fitted)
    for label, share in enumerate(retained.target_mean.tolist()):
        some = 0.5 < share * retained.rows < retained.rows - 0.5
        if not some or not float(own[label]) > 0:
            weight[label], bias[label] = 0, MARGIN if share > 0.5 else -MARGIN
            continue
        yes, no = (float(fitted.weight[label] @ mean + fitted.bias[label]) for mean in retained.means_given(label))
        within = float(own[label]) ** 2 - share * (1 - share) * (yes - no) ** 2
        odds = 0.0 if balanced else math.log(share / (1 - share))
        threshold = (yes + no) / 2 - max(within, 0.0) / max(yes - no, 1e-12) * odds
        factor = SHARPNESS * float(wanted[label] / own[label]) if float(wanted[label]) > 0 else 1.0
        weight[label], bias[label] = factor * weight[label], factor * (bias[label] - threshold)
    return Scores(weight, bias)


def target_filter(scores: Scores, head: Scores, bound: float, absent: Tensor) -> ClosedForm:
    """The filter before a last layer that gives these scores: x → W⁺ (A x + a − b). Absent labels (a mask) never say
    yes: their score is −10, whatever the input, and rounding cannot lift it above 0."""
    weight, bias = scores.weight.clone(), scores.bias.clone()
    weight[absent], bias[absent] = 0, -MARGIN
    made = ClosedForm(head.weight.shape[1], len(head.weight), bound)
    written_into(made, Scores(weight, bias), head, torch.linalg.pinv(head.weight))
    rounding = largest_rounding(made, head)
    if bool(absent.any()) and not rounding < MARGIN:
        raise CutError(
            f"In {head.weight_dtype} the last layer rounds scores by up to {rounding:.3g}: a forgotten label could say "
            "yes. Use the model in single precision."
        )
    return made


def expected_values(retained: TargetStatistics, scores: Scores) -> list[float]:
    """R² of each value on the retained rows, from their moments alone."""
    offset = scores.weight @ retained.mean + scores.bias - retained.target_mean
    squared = retained.spread(scores).square() - 2 * (scores.weight * retained.cross).sum(1)
    errors = (squared + retained.target_variance + offset.square()).clamp(min=0)
    return (1 - errors / retained.deviations.square()).tolist()


def expected_labels(retained: TargetStatistics, scores: Scores) -> dict[int, float]:
    """Balanced accuracy of each label that some retained rows have and some have not, for Gaussian scores."""
    found, spreads = {}, retained.spread(scores)
    for label, share in enumerate(retained.target_mean.tolist()):
        if not 0.5 < share * retained.rows < retained.rows - 0.5:
            continue
        yes, no = (float(scores.weight[label] @ mean + scores.bias[label]) for mean in retained.means_given(label))
        within = float(spreads[label]) ** 2 - share * (1 - share) * (yes - no) ** 2
        width = math.sqrt(2 * max(within, 1e-12))
        found[label] = (2 + math.erf(yes / width) - math.erf(no / width)) / 4
    return found
