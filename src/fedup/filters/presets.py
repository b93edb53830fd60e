"""Presets: our default settings, those of the paper, and those of its authors' code."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fedup.errors import check_choice
from fedup.filters.bottleneck import FilterConfig
from fedup.privacy.paper import SIGMA
from fedup.request import Forget, union

PresetName = Literal["default", "paper", "authors"]
_RATIOS = {"client": 0.8, "class": 0.1, "sample": 0.5, "subject": 0.5}  # of the paper and of its authors' code
_PAPER = FilterConfig(filter="bottleneck", class_policy="remap", guard=False, gentle=False)
_AUTHORS = replace(  # lr is 0.01 on CIFAR-100
    _PAPER, class_policy="remap_client", optimizer="sgd", lr=0.005, batch_size=10, epochs=50
)


@dataclass(frozen=True)
class Preset:
    """Settings of centroids and filters, and whether centroids are collected ahead of requests."""

    ratio: float
    sigma: float
    cache: bool
    config: FilterConfig


def preset(name: PresetName = "default", forget: Forget | Iterable[Forget] = ()) -> Preset:
    """The settings of that name; `paper` and `authors` depend on what is forgotten.

    `default`: centroids collected once, ρ = 0.8, no noise; the bottleneck with a guard for clients and classes, an
    eraser for samples (docs/cuts_and_erasure.md has the figures behind it). `paper`: one bottleneck before the last
    layer for all kinds, centroids collected after each request with ρ = 0.8, 0.1 and 0.5, σ = 0.001, forgotten classes
    relabelled. `authors`: the same as their public code runs it (SGD in batches of 10 for 50 epochs, one new label per
    client for a forgotten class, no noise); docs/fidelity.md lists it.

    >>> preset("paper", Forget.classes([7])).ratio, preset("authors").config.epochs
    (0.1, 50)
    """
    check_choice("preset", name, PresetName)
    if name == "default":
        return Preset(0.8, 0.0, True, FilterConfig())
    kinds = union([forget] if isinstance(forget, Forget) else forget).kind.split("+")
    ratio = max(_RATIOS.get(kind, 0.8) for kind in kinds)
    if name == "authors":
        return Preset(ratio, 0.0, False, _AUTHORS)
    return Preset(ratio, SIGMA, False, _PAPER)
