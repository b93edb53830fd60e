"""Settings that belong together: those that won our measurements, and those of the paper."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fedup.errors import SettingError
from fedup.filter import FilterConfig
from fedup.request import Forget, union

PresetName = Literal["default", "paper"]
_PAPER_RATIOS = {"client": 0.8, "class": 0.1, "sample": 0.5}
_PAPER_SIGMA = 0.001  # 0.01 on CIFAR-100


@dataclass(frozen=True)
class Preset:
    """How centroids are made and filters fitted, and whether centroids are collected ahead of requests."""

    ratio: float
    sigma: float
    cache: bool
    config: FilterConfig


def preset(name: PresetName = "default", forget: Forget | Iterable[Forget] = ()) -> Preset:
    """The settings of that name; those of the paper depend on what is forgotten.

    `default`: centroids of everything once, ρ = 0.8, no noise; the bottleneck with a guard for clients and classes, an
    eraser for samples (docs/cuts_and_erasure.md has the figures that chose it). `paper`: one bottleneck
    before the last layer for all kinds, centroids collected after each request with ρ = 0.8, 0.1 and 0.5, σ = 0.001,
    forgotten classes relabelled.

    >>> preset("paper", Forget.classes([7])).ratio
    0.1
    """
    if name not in get_args(PresetName):
        raise SettingError(f"preset is one of {', '.join(get_args(PresetName))}; found {name!r}.")
    if name == "default":
        return Preset(0.8, 0.0, True, FilterConfig())
    kinds = union([forget] if isinstance(forget, Forget) else forget).kind.split("+")
    ratio = max(_PAPER_RATIOS.get(kind, 0.8) for kind in kinds)
    return Preset(
        ratio, _PAPER_SIGMA, False, FilterConfig(filter="bottleneck", class_policy="remap", guard=False, gentle=False)
    )
