"""The filters that sit at a cut."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedup.errors import SettingError

ClassPolicy = Literal["drop", "remap", "remap_client"]


@dataclass(frozen=True)
class FilterConfig:
    """How a filter is shaped and fitted.

    `class_policy` says what becomes of a forgotten class: `drop` uses nothing of it and guards against it
    (`fedup.guard`); `remap` relabels each of its centroids to a random retained class; `remap_client` does so per
    client.
    """

    rank: int = 32
    alpha: float = 0.5
    steps: int = 300
    batch_size: int = 128
    lr: float = 3e-3
    class_policy: ClassPolicy = "drop"
    guard: bool = True
    weighted: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SettingError(f"alpha weighs cross-entropy against reconstruction, in [0, 1]; found {self.alpha}.")
        whole = {"rank": self.rank, "steps": self.steps, "batch_size": self.batch_size}
        for name, value in whole.items():
            if not isinstance(value, int):
                raise SettingError(f"{name} must be a whole number; found {value!r}.")
        if self.rank < 1:
            raise SettingError(f"rank, the width of the bottleneck, must be at least 1; found {self.rank}.")
        if self.steps < 1 or self.batch_size < 1 or not 0 < self.lr < float("inf"):
            raise SettingError(
                f"steps and batch_size must be 1 or more, lr above 0; found {self.steps}, {self.batch_size}, {self.lr}."
            )
        if self.class_policy not in ("drop", "remap", "remap_client"):
            raise SettingError(f"class_policy is 'drop', 'remap' or 'remap_client'; found {self.class_policy!r}.")


class Bottleneck(nn.Module):
    """The paper's filter: d → rank → d, no bias, ReLU between; a final ReLU where features cannot be negative.

    >>> Bottleneck(512, 32, nonnegative=True).size_bytes
    131072
    """

    def __init__(self, width: int, rank: int, *, nonnegative: bool, source: torch.Generator | None = None) -> None:
        super().__init__()
        if rank > width:
            raise SettingError(
                f"rank {rank} is wider than the {width} features at the cut: use FilterConfig(rank={width}) or less."
            )
        self.nonnegative = nonnegative
        self.encoder = nn.Parameter(torch.empty(rank, width))
        self.decoder = nn.Parameter(torch.empty(width, rank))
        for weight in (self.encoder, self.decoder):  # as nn.Linear does
            nn.init.kaiming_uniform_(weight, a=5**0.5, generator=source)

    @property
    def width(self) -> int:
        """Number of features at the cut."""
        return self.encoder.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of the filter's weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1).to(self.encoder.dtype)  # (N, D)
        passed = linear(torch.relu(linear(flat, self.encoder)), self.decoder)
        if self.nonnegative:
            passed = torch.relu(passed)
        return passed.reshape(features.shape).to(features.dtype)
