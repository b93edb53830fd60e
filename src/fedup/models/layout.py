"""Features as positions × channels: positions of a convolution map, tokens of a transformer, or one vector."""

import math
from typing import Literal, get_args

from torch import Tensor

from fedup.errors import SettingError

Granularity = Literal["each", "tokens"]  # an eraser acts on each position by itself, or on all tokens alike


def to_positions(features: Tensor, granularity: Granularity = "each") -> Tensor:
    """(N, *shape) as (N, positions, channels); for "tokens" each token is a row.

    (C, H, W) is a map, (T, C) are tokens, (C,) is one vector.
    """
    if features.ndim < 3:
        return features.flatten(1)[:, None]
    spread = features.flatten(2).transpose(1, 2) if features.ndim > 3 else features
    return spread.flatten(0, 1)[:, None] if granularity == "tokens" else spread


def from_positions(spread: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_positions`, for rows of a shape."""
    if len(shape) < 3:
        return spread.reshape(-1, *shape)
    return spread.reshape(-1, math.prod(shape[1:]), shape[0]).transpose(1, 2).reshape(-1, *shape)


def known_granularity(name: str) -> Granularity:
    """The granularity of that name; raises if there is none."""
    if name not in get_args(Granularity):
        raise SettingError(f"A filter acts on {', '.join(get_args(Granularity))}; found {name!r}.")
    return name  # type: ignore[return-value]
