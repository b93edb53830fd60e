"""How sure a figure is: intervals that hold for any number of trials, without a normal approximation of rates."""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NORMAL = NormalDist()
_STEPS = 60  # of a bisection
Scores = NDArray[np.float64]


def binomial_tail(successes: int, n: int, rate: float) -> float:
    """P(K ≥ successes) of n trials with that rate.

    >>> round(binomial_tail(9, 10, 0.5), 5)  # 11/1024
    0.01074
    """
    if successes <= 0:
        return 1.0
    if not 0 < rate < 1 or successes > n:
        return float(rate >= 1 and successes <= n)
    k, ways = _ways(successes, n)
    return min(1.0, float((ways + k * math.log(rate) + (n - k) * math.log1p(-rate)).exp().sum()))


@lru_cache(maxsize=4)
def _ways(successes: int, n: int) -> tuple[Tensor, Tensor]:
    """Each number of successes from that one on, and the logarithm of how many ways there are to it."""
    k = torch.arange(successes, n + 1, dtype=torch.float64)
    return k, math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """An interval for a rate that holds at least so often, whatever the rate; either end alone errs half as often.

    >>> [round(end, 3) for end in clopper_pearson(0, 10)]
    [0.0, 0.308]
    """
    each = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _where(lambda rate: binomial_tail(successes, n, rate) >= each)[0]
    high = 1.0 if successes == n else _where(lambda rate: 1 - binomial_tail(successes + 1, n, rate) <= each)[1]
    return low, high


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
    """The share of members found while that share of non-members is accused, with its 95 % interval.

    Two things are uncertain: where the threshold lies, for which order statistics of the non-members bound the true
    quantile, and the share of members above it (Clopper & Pearson 1934). Four one-sided errors share the 5 %.
    """
    n, each = len(others), 0.05 / 4
    falling = np.append(np.sort(others)[::-1], -np.inf)
    allowed = math.floor(rate * n + 1e-9)
    fewest, most = _around(n, rate, each)

    def found(threshold: float) -> int:
        return int((members > threshold).sum())

    low, _ = clopper_pearson(found(falling[fewest - 1] if fewest else np.inf), len(members), 1 - 2 * each)
    _, high = clopper_pearson(found(falling[most]), len(members), 1 - 2 * each)
    return found(falling[allowed]) / len(members), low, high


@cache
def _around(n: int, rate: float, each: float) -> tuple[int, int]:
    """The fewest and the most successes of n trials, but for an error on either side."""
    fewest = most = math.floor(rate * n + 1e-9)
    while fewest and 1 - binomial_tail(fewest, n, rate) > each:
        fewest -= 1
    while most < n and binomial_tail(most + 1, n, rate) > each:
        most += 1
    return fewest, most


def _where(holds: Callable[[float], bool]) -> tuple[float, float]:
    """The last rate at which something does not hold yet, and the first at which it does."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def _share_below(sample: Scores, values: Scores) -> Scores:
    """For each value the share of the sample below it, ties counted half."""
    ordered = np.sort(sample)
    left, right = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (left + right) / (2 * len(sample))
