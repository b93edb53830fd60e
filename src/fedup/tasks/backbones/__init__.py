"""Public backbones, one file each: what it `TAKES` ("image", "text" or "table"), its `ORIGIN`, its public grid
(`STEP`), its `PREPROCESSING` in words, and a function `build(shape)` that gives the module. Weights are found offline.

It may say which mean and deviation of pixels from 0 to 1 it was trained with (`PIXELS`); inputs are scaled to these. A
file of your own, and a folder of a Hugging Face model, work as well."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.models.backbone import Backbone, resized
from fedup.registry import find, names

_KINDS = {3: "image", 1: "text"}  # by the number of a row's axes


class Rescaled(nn.Module):
    """Pixels as a data set gives them, scaled to the mean and deviation that a backbone was trained with."""

    scale: Tensor
    shift: Tensor

    def __init__(self, module: nn.Module, given: tuple[Any, Any], wanted: tuple[float, float]) -> None:
        super().__init__()
        self.module = module
        mean, std = (torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) for values in given)
        self.register_buffer("scale", std / wanted[1])
        self.register_buffer("shift", (mean - wanted[0]) / wanted[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x * self.scale + self.shift)


def load_backbone(
    name: str, shape: tuple[int, ...], *, features: int | None = None, inputs: Mapping[str, Any] | None = None
) -> Backbone:
    """The backbone of that name for inputs of a shape; `features` projects to fewer, or puts random ones
    behind them.

    `inputs` says how the data set scales pixels (`input_of(data).identity()`), so that the backbone gets what it was
    trained with.

    >>> load_backbone("random_conv", (1, 28, 28)).width
    576
    """
    kind = (inputs or {}).get("kind") or _KINDS.get(len(shape))
    if Path(name).is_dir():
        from fedup.tasks.backbones._hugging_face import folder_backbone

        backbone = folder_backbone(Path(name), shape, inputs)
    else:
        module = _find(name)
        takes = getattr(module, "TAKES", None)
        if takes is not None and kind is not None and takes != kind:
            raise SettingError(f"{name} takes {takes}s, and the data set has {kind}s: choose another backbone.")
        built, preprocessing = module.build(shape), getattr(module, "PREPROCESSING", "none")
        if (pixels := getattr(module, "PIXELS", None)) and inputs and "mean" in inputs:
            built = Rescaled(built, (inputs["mean"], inputs["std"]), pixels)
            preprocessing += f"; pixels with mean {pixels[0]:g} and deviation {pixels[1]:g}"
        backbone = Backbone(
            built,
            blank_row(shape, kind),
            origin=module.ORIGIN,
            step=getattr(module, "STEP", None),
            preprocessing=preprocessing,
        )
    return backbone if features is None else resized(backbone, features, blank_row(shape, kind))


def backbone_names() -> list[str]:
    """Those that come with fedup."""
    return names(__name__)


def blank_row(shape: tuple[int, ...], kind: str | None = None) -> Tensor:
    """One blank row: images and tables are floats, texts ids of word pieces."""
    return torch.zeros(1, *shape, dtype=torch.long if (kind or _KINDS.get(len(shape))) == "text" else torch.float32)


def _find(name: str) -> ModuleType:
    return find(__name__, name, needs=("build", "ORIGIN"))
