"""LeNet-5 with a 512-wide last hidden layer, as in the paper; cut it at any of its layers."""

from collections import OrderedDict

from torch import nn

from fedup.errors import SettingError

TAKES = "image"
CUTS = ("conv2", "flatten", "fc1", "fc2", "head")
TRAINING = {"lr": 0.05}
FUSED_LAYERS = ("conv1", "head")


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-5 for images of (channels, height, width)."""
    channels, height, width = shape
    if min(_after_convolutions(height), _after_convolutions(width)) < 1:
        raise SettingError(f"lenet5 needs images of at least 16×16; found {height}×{width}.")
    flat = 16 * _after_convolutions(height) * _after_convolutions(width)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 512),
            relu4=nn.ReLU(),
            head=nn.Linear(512, num_classes),
        )
    )


def _after_convolutions(size: int) -> int:
    """Side of the map after two rounds of 5×5 convolution and 2×2 pooling."""
    return ((size - 4) // 2 - 4) // 2
