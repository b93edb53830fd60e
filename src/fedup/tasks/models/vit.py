"""A small vision transformer (Dosovitskiy et al. 2021): patch 4, width 512, depth 6, 8 heads, mean pooling."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fedup.errors import SettingError

TAKES = "image"
CUTS = (*(f"block{depth + 1}" for depth in range(6)), "norm", "head")
TRAINING = {"optimizer": "adam", "lr": 1e-4, "precision": "auto"}
_LAYERS = ("query_key_value", "joined", "mlp.0", "mlp.2")
FUSED_LAYERS = ("patches.project", *(f"block{depth}.{layer}" for depth in (1, 2) for layer in _LAYERS), "head")
_PATCH, _WIDTH, _DEPTH, _HEADS, _HIDDEN = 4, 512, 6, 8, 512


class Patches(nn.Module):
    """Images to one vector for each patch, with its place added."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, _WIDTH, _PATCH, _PATCH)
        self.place = nn.Parameter(torch.randn(1, count, _WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.place  # (N, patches, width)


class Block(nn.Module):
    """Attention among patches, then two layers for each; each reads a normed input and adds to it.

    Written out because torch's own layer computes otherwise, in the last bits, when no gradient is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.joined = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(self.norm1(x)).unflatten(2, (3, _HEADS, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (N, heads, patches, width / heads) each
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.joined(attended)
        return x + self.mlp(self.norm2(x))


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
    layers += [(f"block{depth + 1}", Block()) for depth in range(_DEPTH)]
    layers += [("norm", nn.LayerNorm(_WIDTH)), ("pool", Pool()), ("head", nn.Linear(_WIDTH, num_classes))]
    return nn.Sequential(OrderedDict(layers))
