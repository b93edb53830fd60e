"""Random convolutions: seeded weights that nobody trained, nothing to download. Useful for small grey images."""

import torch
from torch import Tensor, nn

from fedup.errors import SettingError
from fedup.models.backbone import Origin
from fedup.rng import generator

TAKES = "image"
ORIGIN = Origin("random weights, drawn from seed 0", "Apache-2.0", "fedup: nobody trained it")
STEP = 2.0**-10
PREPROCESSING = "rows as the data set gives them"
_FILTERS, _SIDE, _POOL = 64, 7, 3


class RandomConv(nn.Module):
    """Random filters of two signs, rectified, and their means over a grid of fields of the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, _FILTERS, _SIDE, padding=_SIDE // 2)
        source = generator(0, "random_conv", channels)
        with torch.no_grad():
            drawn = torch.randn(self.conv.weight.shape, generator=source)
            drawn -= drawn.mean((1, 2, 3), keepdim=True)
            self.conv.weight.copy_(drawn / drawn.flatten(1).norm(dim=1)[:, None, None, None])
            assert self.conv.bias is not None
            self.conv.bias.copy_(torch.randn(_FILTERS, generator=source) * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(self.conv(x).relu(), _POOL).flatten(1)


def build(shape: tuple[int, ...]) -> nn.Module:
    """For images of (channels, height, width)."""
    if len(shape) != 3 or min(shape[1:]) < _POOL:
        raise SettingError(f"random_conv takes images of at least {_POOL}×{_POOL}; found {shape}.")
    return RandomConv(shape[0])
