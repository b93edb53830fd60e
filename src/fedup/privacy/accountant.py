"""The accountant: Gaussian releases as μ-GDP, and the exact (ε, δ) that follows (Balle & Wang 2018; Dong et al. 2022).

A Gaussian release of l2 sensitivity Δ with noise σ is μ-GDP with μ = Δ/σ, and releases add up as μ² = Σ μᵢ², even if
later ones depend on earlier ones. μ-GDP is (ε, δ)-DP exactly where δ ≥ Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ).
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

from fedup.errors import SettingError

_STEPS = 200  # of a bisection: more than a float has bits
_TAIL = 25.0  # beyond it the tail of the normal distribution comes from its series
LARGEST_EPSILON = 1e6


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest δ for which μ-GDP is (ε, δ)-DP.

    >>> round(delta_of(1.0, 1.0), 4)
    0.1269
    """
    if not (mu >= 0 and epsilon >= 0):
        raise SettingError(f"μ and ε must be 0 or more; found {mu} and {epsilon}.")
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    first = _log_normal(mu / 2 - epsilon / mu)
    second = epsilon + _log_normal(-mu / 2 - epsilon / mu)
    return max(0.0, -math.exp(first) * math.expm1(second - first)) if second < first else 0.0


@lru_cache(maxsize=4096)  # most clients of a federation have spent the same
def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 for which μ-GDP is (ε, δ)-DP, rounded up by less than 1e-9 of it.

    >>> round(epsilon_of(1.0, 1e-5), 3)
    4.377
    """
    _check_delta(delta)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    return _boundary(lambda epsilon: delta_of(mu, epsilon) > delta)[1]


@cache
def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ that is (ε, δ)-DP: the least noise that a Gaussian release may have is its sensitivity over μ.

    >>> round(1 / mu_of(1.0, 1e-5), 3)
    3.731
    """
    _check_delta(delta)
    if not 0 < epsilon <= LARGEST_EPSILON:
        raise SettingError(f"ε must be above 0 and at most {LARGEST_EPSILON:.0f}; found {epsilon}.")
    return _boundary(lambda mu: delta_of(mu, epsilon) <= delta)[0]


def _boundary(holds: Callable[[float], bool]) -> tuple[float, float]:
    """The last number from 0 on for which a condition holds, and the first for which it does not."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
        if high > 1e300:
            return low, math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise SettingError(f"δ must lie strictly between 0 and 1; found {delta}.")


def _log_normal(x: float) -> float:
    """log Φ(x), also where Φ(x) itself is 0 to a float."""
    if x > -_TAIL:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    inverse = 1 / (x * x)
    series = 1 - inverse * (1 - 3 * inverse * (1 - 5 * inverse * (1 - 7 * inverse)))
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)
