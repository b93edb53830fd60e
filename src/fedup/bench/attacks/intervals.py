"""How sure a figure is: intervals that hold for any number of trials, without a normal approximation of rates."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NORMAL = NormalDist()
Scores = NDArray[np.float64]


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """An interval for a rate with at least this confidence, whatever the rate; each end alone errs half as often.

    >>> [round(end, 3) for end in clopper_pearson(0, 10)]
    [0.0, 0.308]
    """
    from scipy.stats import beta

    each = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(each, successes, n - successes + 1))
    high = 1.0 if successes == n else float(beta.isf(each, successes + 1, n - successes))
    return low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The mean of a few figures, each from a trial of its own, with its interval (Student's t).

    >>> [round(figure, 2) for figure in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48]
    """
    from scipy.stats import t

    sample = np.asarray(values, dtype=np.float64)
    mean, n = float(sample.mean()), len(sample)
    reach = float(t.isf((1 - confidence) / 2, n - 1) * sample.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf
    return mean, mean - reach, mean + reach


def auc(members: Scores, others: Scores) -> tuple[float, float, float]:
    """How often a member scores above a non-member, ties counted half, with its 95 % interval (DeLong et al. 1988).

    Where the two do not overlap the variance says nothing; there the smaller group's rate bounds it instead.
    """
    above = _share_below(others, members)  # (members,)
    below = _share_below(members, others)
    figure = float(above.mean())
    if figure in (0.0, 1.0):
        fewest = min(len(members), len(others))
        low, high = clopper_pearson(round(figure * fewest), fewest)
        return figure, low, high
    deviation = math.sqrt(above.var(ddof=1) / len(members) + below.var(ddof=1) / len(others))
    reach = NORMAL.inv_cdf(0.975) * deviation
    return figure, max(0.0, figure - reach), min(1.0, figure + reach)


def tpr_at_fpr(members: Scores, others: Scores, rate: float) -> tuple[float, float, float]:
    """The share of members found at this false-positive rate, with its 95 % interval.

    Two things are uncertain: where the threshold lies, for which order statistics of the non-members bound the true
    quantile, and the share of members above it (Clopper & Pearson 1934). Four one-sided errors share the 5 %.
    """
    from scipy.stats import binom

    n, each = len(others), 0.05 / 4
    falling = np.append(np.sort(others)[::-1], -np.inf)
    allowed = math.floor(rate * n + 1e-9)
    fewest, most = min(allowed, int(binom.ppf(each, n, rate))), max(allowed, int(binom.isf(each, n, rate)))

    def found(threshold: float) -> int:
        return int((members > threshold).sum())

    low, _ = clopper_pearson(found(falling[fewest - 1] if fewest else np.inf), len(members), 1 - 2 * each)
    _, high = clopper_pearson(found(falling[most]), len(members), 1 - 2 * each)
    return found(falling[allowed]) / len(members), low, high


def _share_below(sample: Scores, values: Scores) -> Scores:
    """For each value the share of the sample below it, ties counted half."""
    ordered = np.sort(sample)
    left, right = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (left + right) / (2 * len(sample))
