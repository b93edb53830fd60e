"""Features as positions × channels: the places of a convolution map, the tokens of a transformer, or one vector."""

import math
from typing import Literal, get_args

from torch import Tensor

from fedup.errors import SettingError

# What one filter acts on: each position by itself, the row as one vector, or any token wherever it stands.
Granularity = Literal["each", "all", "tokens"]


def positions_of(shape: tuple[int, ...], over: Granularity = "each") -> tuple[int, int]:
    """Number of positions and of channels of a row's features.

    (C, H, W) is a map with its channels first, (T, C) are tokens, (C,) is a single vector.

    >>> positions_of((64, 8, 8)), positions_of((16, 128)), positions_of((512,)), positions_of((64, 8, 8), "all")
    ((64, 64), (16, 128), (1, 512), (1, 4096))
    """
    whole = math.prod(shape)
    if over == "all" or len(shape) < 2:
        return 1, whole
    channels = shape[-1] if len(shape) == 2 else shape[0]
    return (1, channels) if over == "tokens" else (whole // channels, channels)


def to_positions(features: Tensor, over: Granularity = "each") -> Tensor:
    """(N, *shape) as (N, positions, channels); with one filter for all tokens each token is a row."""
    if over == "all" or features.ndim < 3:
        return features.flatten(1)[:, None]
    spread = features.flatten(2).transpose(1, 2) if features.ndim > 3 else features
    return spread.flatten(0, 1)[:, None] if over == "tokens" else spread


def from_positions(spread: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_positions`, for rows of a shape."""
    if len(shape) < 3 or spread.shape[1:] == (1, math.prod(shape)):
        return spread.reshape(-1, *shape)
    channels = shape[0]
    return spread.reshape(-1, math.prod(shape[1:]), channels).transpose(1, 2).reshape(-1, *shape)


def known_granularity(over: str) -> Granularity:
    """The same, if it is one of them."""
    if over not in get_args(Granularity):
        raise SettingError(f"A filter acts on {', '.join(get_args(Granularity))}; found {over!r}.")
    return over  # type: ignore[return-value]
