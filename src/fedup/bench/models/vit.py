"""A small vision transformer (Dosovitskiy et al. 2021): patch 4, width 512, depth 6, 8 heads, mean pooling."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedup.errors import SettingError

TAKES = "image"
CUTS = (*(f"block{depth + 1}" for depth in range(6)), "norm", "head")
TRAINING = {"optimizer": "adam", "lr": 1e-4}
_PATCH, _WIDTH, _DEPTH, _HEADS, _HIDDEN = 4, 512, 6, 8, 512


class Patches(nn.Module):
    """Images to one vector for each patch, with its place added."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, _WIDTH, _PATCH, _PATCH)
        self.place = nn.Parameter(torch.randn(1, count, _WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.place  # (N, patches, width)


class Pool(nn.Module):
    """The mean over patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The transformer for images of (channels, height, width); cut it at any layer."""
    channels, height, width = shape
    if height % _PATCH or width % _PATCH:
        raise SettingError(f"vit cuts images into {_PATCH}×{_PATCH} patches; found {height}×{width}.")
    layers: list[tuple[str, nn.Module]] = [("patches", Patches(channels, height // _PATCH * (width // _PATCH)))]
    for depth in range(_DEPTH):
        block = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, _HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        layers.append((f"block{depth + 1}", block))
    layers += [("norm", nn.LayerNorm(_WIDTH)), ("pool", Pool()), ("head", nn.Linear(_WIDTH, num_classes))]
    return nn.Sequential(OrderedDict(layers))
