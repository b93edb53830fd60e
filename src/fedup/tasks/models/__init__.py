"""Models, one file each: what it `TAKES` ("image", "text" or "table"), a function `build(shape, num_classes)`, and
optionally the places for a filter, from early to late (`CUTS`), how fast it learns (`TRAINING`), and which layers the
authors of FUSED put deltas on (`FUSED_LAYERS`)."""

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedup.errors import SettingError
from fedup.registry import find

_KINDS = {3: ("image",), 1: ("text", "table")}  # by the number of a row's axes


def build_model(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model of that name for inputs of a shape; weights from torch's global random state."""
    module = _find(name)
    takes, kinds = getattr(module, "TAKES", None), _KINDS.get(len(shape))
    if takes is not None and kinds is not None and takes not in kinds:
        raise _mismatch(name, takes, kinds[0])
    built: nn.Module = module.build(shape, num_classes)
    if cuts := getattr(module, "CUTS", ()):
        built.cuts = cuts  # what the model offers to filters
    if layers := getattr(module, "FUSED_LAYERS", ()):
        built.fused_layers = layers
    return built


def check_takes(name: str, kind: str) -> None:
    """Raise if the model takes inputs of another kind."""
    takes = getattr(_find(name), "TAKES", None)
    if takes not in (None, kind):
        raise _mismatch(name, takes, kind)


def _mismatch(name: str, takes: str, kind: str) -> SettingError:
    return SettingError(f"{name} takes {takes}s, and the data set has {kind}s: choose another model (`fedup list`).")


def cuts_of(name: str) -> tuple[str, ...]:
    """The places for a filter that the model names, from early to late; the last is the default."""
    return tuple(getattr(_find(name), "CUTS", ()))


def training_of(name: str) -> dict[str, Any]:
    """The local optimizer and learning rate that suit the model."""
    return getattr(_find(name), "TRAINING", {})


def model_code(name: str) -> str:
    """sha256 of the file that defines the model: with other code the same weights are another model."""
    return hashlib.sha256(Path(str(_find(name).__file__)).read_bytes()).hexdigest()


def _find(name: str) -> ModuleType:
    return find(__name__, name, needs=("build",))
