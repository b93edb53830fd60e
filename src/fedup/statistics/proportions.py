"""Intervals for shares and differences of shares, wide even if all answers agree (Newcombe 1998)."""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from operator import mul

_Z = 1.959963984540054  # 95 %


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The length of the interval."""
        return self.high - self.low

    def __sub__(self, other: "Estimate") -> "Estimate":
        """The difference of two independent estimates (Newcombe's hybrid score)."""
        value, below = self.value - other.value, math.hypot(self.value - self.low, other.high - other.value)
        return Estimate(value, value - below, value + math.hypot(self.high - self.value, other.value - other.low))


@dataclass(frozen=True)
class Paired:
    """Answers of two models to the same rows: the number of rows, of hits before and after, and of hits both times.

    Counts add up over clients. If a hit has a weight in [0, 1], they are sums of weights.
    """

    rows: float = 0.0
    before: float = 0.0
    after: float = 0.0
    both: float = 0.0

    def __add__(self, other: "Paired") -> "Paired":
        return Paired(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Paired") -> "Paired":
        return Paired(*(own - part for own, part in zip(astuple(self), astuple(other), strict=True)))

    def at_most(self, rows: float) -> "Paired":
        """The same shares, of no more rows than that."""
        if self.rows <= rows:
            return self
        return Paired(*(rows * (number / self.rows) for number in astuple(self)))

    @property
    def share_before(self) -> Estimate:
        """The share of hits before, with Wilson's score interval."""
        return wilson(self.before, self.rows)

    @property
    def share_after(self) -> Estimate:
        """The share of hits after."""
        return wilson(self.after, self.rows)

    @property
    def change(self) -> Estimate:
        """Share after less share before, on the same rows (Newcombe's method 10 for paired shares).

        >>> Paired(100, 100, 100, 100).change.width > 0.07  # not certain though all agree
        True
        """
        before, after, link = self.share_before, self.share_after, self._correlation()
        value, below = after.value - before.value, _linked(after.value - after.low, before.high - before.value, link)
        above = _linked(after.high - after.value, before.value - before.low, link)
        return Estimate(value, value - below, value + above)

    def _correlation(self) -> float:
        """Of hits before and after, with Newcombe's continuity correction."""
        only_after, only_before = self.after - self.both, self.before - self.both
        neither = self.rows - self.both - only_after - only_before
        scale = self.before * (self.rows - self.before) * self.after * (self.rows - self.after)
        product = self.both * neither - only_after * only_before
        if scale <= 0:
            return 0.0
        return (max(product - self.rows / 2, 0.0) if product > 0 else product) / math.sqrt(scale)


def _linked(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))


def wilson(hits: float, rows: float) -> Estimate:
    """A share and its Wilson interval.

    >>> wilson(10, 10).low < 0.75
    True
    """
    if rows <= 0:
        return Estimate(0.0, 0.0, 1.0)
    share = min(max(hits / rows, 0.0), 1.0)
    centre = (share + _Z**2 / (2 * rows)) / (1 + _Z**2 / rows)
    half = _Z / (1 + _Z**2 / rows) * math.sqrt(share * (1 - share) / rows + _Z**2 / (4 * rows**2))
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def weighted(strata: Iterable[tuple[float, Paired]]) -> Paired:
    """Strata in given proportions as one group, with its effective number of rows: 1/Σ(weight²/rows), Σ weight = 1."""
    used = [(weight, stratum) for weight, stratum in strata if weight > 0 and stratum.rows > 0]
    if not used:
        return Paired()
    total = sum(weight for weight, _ in used)
    rows = 1 / sum((weight / total) ** 2 / stratum.rows for weight, stratum in used)
    scales = [weight / total * rows / stratum.rows for weight, stratum in used]
    hits = zip(*((stratum.before, stratum.after, stratum.both) for _, stratum in used), strict=True)
    return Paired(rows, *(sum(map(mul, scales, counts)) for counts in hits))
