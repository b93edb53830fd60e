"""Where an eraser sits: a cut and some of its positions, judged by what they cover and what they cost."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedup.models.layout import Granularity
from fedup.statistics.moments import Shift

ENOUGH = 0.99  # share of the shift: more positions would be erased for nothing
CLEAR = 4.0  # times chance: a position with a smaller shift is left alone
LEAST_COVER = 0.5  # share of the shift that a cut must cover within the price


@dataclass(frozen=True)
class EraserSite:
    """A cut and the positions of it that would be erased.

    `cover` is the share of the shift between forgotten and retained rows at these positions, `price` the share of the
    variance within both that would be erased too, `signal` the shift over the one expected by chance.
    """

    cut: str
    granularity: Granularity
    positions: tuple[int, ...]
    of: int  # positions of the cut
    cover: float
    price: float
    signal: float

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the number of positions in place of the positions."""
        signal = self.signal if math.isfinite(self.signal) else None
        plain = {**asdict(self), "positions": len(self.positions), "signal": signal}
        return {"over" if name == "granularity" else name: value for name, value in plain.items()}


def judge_site(cut: str, granularity: Granularity, shift: Shift, *, max_variance_loss: float) -> EraserSite:
    """The most telling positions of a cut: until they cover nearly all of the shift, or cost too much."""
    clear = shift.distance > CLEAR * shift.noise
    clear = clear if bool(clear.any()) else torch.ones_like(clear)  # an eraser may be required all the same
    excess = torch.where(clear, (shift.distance - shift.noise).clamp(min=0), 0)
    price = torch.where(shift.fisher > 0, shift.distance / shift.fisher.clamp(min=1e-30), 0)
    order = torch.where(clear, shift.fisher, -1).argsort(descending=True, stable=True)
    covers = excess[order].double().cumsum(0) / excess.double().sum().clamp(min=1e-30)
    prices = (shift.rows * price[order].double()).cumsum(0) / shift.variance.double().sum().clamp(min=1e-30)
    enough = int((covers < ENOUGH).sum()) + 1
    affordable = max(1, int((prices <= max_variance_loss).sum()))
    count = min(enough, affordable, int(clear.sum()))
    positions, cover, price_paid = sorted(order[:count].tolist()), covers[count - 1], prices[count - 1]
    signal = shift.distance.sum() / shift.noise.sum().clamp(min=1e-30)
    return EraserSite(cut, granularity, tuple(positions), len(order), float(cover), float(price_paid), float(signal))


def choose_site(sites: Sequence[EraserSite], *, max_variance_loss: float) -> EraserSite:
    """The earliest cut that covers most of the shift within the price; else the one that covers most for its price.

    What is erased early cannot grow in later layers.
    """
    for site in sites:
        if site.cover >= LEAST_COVER and site.price <= max_variance_loss:
            return site
    return max(sites, key=lambda site: (site.cover / max(site.price, max_variance_loss), site.cover))
