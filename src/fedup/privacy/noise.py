"""Normal noise from the operating system's entropy, which nobody can replay; from a seed only for tests."""

import secrets

import numpy as np
import torch
from torch import Tensor

from fedup.rng import generator


def normal(size: int, *, replay: tuple[object, ...] | None = None) -> Tensor:
    """Independent standard normal numbers in double precision. (size,)

    Each is made of 128 fresh bits of the system's entropy. With `replay`, the name of a seeded stream, anyone who knows
    it can subtract them: then nothing is protected, and whoever shows the result must say so.
    """
    if replay is not None:
        return torch.randn(size, generator=generator(0, "replayable noise", *replay), dtype=torch.float64)
    drawn = np.frombuffer(secrets.token_bytes(16 * size), dtype=np.uint64).reshape(2, size)
    radius, angle = (drawn >> 11).astype(np.float64) * 2.0**-53  # in [0, 1)
    return torch.from_numpy(np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle))  # Box & Muller 1958
