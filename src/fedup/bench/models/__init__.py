"""Models, one file each: what it `TAKES` ("image" or "text"), a function `build(shape, num_classes)`, and optionally
the places for a filter, from early to late (`CUTS`), and how fast it learns (`TRAINING`)."""

from typing import Any

from torch import nn

from fedup.registry import find


def build_model(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model of that name for inputs of a shape; weights from torch's global random state."""
    built: nn.Module = find(__name__, name, needs=("build",)).build(shape, num_classes)
    return built


def cuts_of(name: str) -> tuple[str, ...]:
    """The places for a filter that the model names, from early to late; the last is the default."""
    found: tuple[str, ...] = getattr(find(__name__, name, needs=("build",)), "CUTS", ())
    return found


def training_of(name: str) -> dict[str, Any]:
    """The local optimizer and learning rate that suit the model."""
    found: dict[str, Any] = getattr(find(__name__, name, needs=("build",)), "TRAINING", {})
    return found
