"""Public backbones, one file each: what it `TAKES` ("image" or "text"), its `ORIGIN`, its public grid (`STEP`), its
`PREPROCESSING` in words, and a function `build(shape)` that gives the module. Weights are found offline.

A file of your own, and a folder of a Hugging Face model, work as well."""

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fedup.errors import SettingError
from fedup.models.backbone import Backbone, projected
from fedup.registry import find, names

_KINDS = {3: "image", 1: "text"}  # by the number of a row's axes


def load_backbone(name: str, shape: tuple[int, ...], *, features: int | None = None) -> Backbone:
    """The backbone of that name for inputs of a shape; `features` projects to fewer.

    >>> load_backbone("random_conv", (1, 28, 28)).width
    576
    """
    if Path(name).is_dir():
        from fedup.tasks.backbones._hugging_face import folder_backbone

        backbone = folder_backbone(Path(name), shape)
    else:
        module = _find(name)
        takes, kind = getattr(module, "TAKES", None), _KINDS.get(len(shape))
        if takes is not None and kind is not None and takes != kind:
            raise SettingError(f"{name} takes {takes}s, and the data set has {kind}s: choose another backbone.")
        backbone = Backbone(
            module.build(shape),
            blank_row(shape),
            origin=module.ORIGIN,
            step=getattr(module, "STEP", None),
            preprocessing=getattr(module, "PREPROCESSING", "none"),
        )
    return backbone if features is None else projected(backbone, features, blank_row(shape))


def backbone_names() -> list[str]:
    """Those that come with fedup."""
    return names(__name__)


def blank_row(shape: tuple[int, ...]) -> Tensor:
    """One blank row: images are floats, texts ids of word pieces."""
    return torch.zeros(1, *shape, dtype=torch.long if _KINDS.get(len(shape)) == "text" else torch.float32)


def _find(name: str) -> ModuleType:
    return find(__name__, name, needs=("build", "ORIGIN"))
