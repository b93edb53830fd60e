"""Where an eraser sits: a cut and positions of it, judged by what is covered there and what that costs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedup.models.layout import Granularity
from fedup.statistics.moments import Shift

ENOUGH = 0.99  # of the shift: more positions would be erased for nothing
CLEAR = 4.0  # times chance: a position that differs by less is left alone
LEAST_COVER = 0.5  # of the shift that must be within the price for a cut to be taken


@dataclass(frozen=True)
class EraserSite:
    """A cut and the positions of it that would be erased.

    `cover` is the share of the shift between forgotten and retained rows that lies at these positions, `price` the
    share of the variance within both that would go with it, `signal` how many times larger the shift is than it would
    be by chance.
    """

    cut: str
    granularity: Granularity
    positions: tuple[int, ...]
    of: int  # positions that the cut has
    cover: float
    price: float
    signal: float

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the number of positions in place of all of them."""
        signal = self.signal if math.isfinite(self.signal) else None
        plain = {**asdict(self), "positions": len(self.positions), "signal": signal}
        return {"over" if name == "granularity" else name: value for name, value in plain.items()}


def judge_site(cut: str, granularity: Granularity, shift: Shift, *, max_variance_loss: float) -> EraserSite:
    """The most telling positions of a cut: until they hold nearly all of the shift, or would cost too much."""
    clear = shift.distance > CLEAR * shift.noise
    clear = clear if bool(clear.any()) else torch.ones_like(clear)  # where an eraser was asked for all the same
    excess = torch.where(clear, (shift.distance - shift.noise).clamp(min=0), 0)
    price = torch.where(shift.fisher > 0, shift.distance / shift.fisher.clamp(min=1e-30), 0)
    order = torch.where(clear, shift.fisher, -1).argsort(descending=True, stable=True)
    covers = excess[order].double().cumsum(0) / excess.double().sum().clamp(min=1e-30)
    prices = (shift.rows * price[order].double()).cumsum(0) / shift.variance.double().sum().clamp(min=1e-30)
    enough = int((covers < ENOUGH).sum()) + 1
    affordable = max(1, int((prices <= max_variance_loss).sum()))
    many = min(enough, affordable, int(clear.sum()))
    return EraserSite(
        cut,
        granularity,
        tuple(sorted(order[:many].tolist())),
        len(order),
        cover=float(covers[many - 1]),
        price=float(prices[many - 1]),
        signal=float(shift.distance.sum() / shift.noise.sum().clamp(min=1e-30)),
    )


def choose_site(sites: Sequence[EraserSite], *, max_variance_loss: float) -> EraserSite:
    """The earliest cut at which most of the shift can be had within the price; else where most of it can be had.

    The earlier the cut, the less the network has made of the shift: what is erased there cannot grow behind it.
    """
    for site in sites:
        if site.cover >= LEAST_COVER and site.price <= max_variance_loss:
            return site
    return max(sites, key=lambda site: (site.cover / max(site.price, max_variance_loss), site.cover))
