"""Two hidden layers for rows of a table."""

from collections import OrderedDict
from math import prod

from torch import nn

TAKES = "table"
CUTS = ("fc2", "head")
TRAINING = {"lr": 0.02}
FUSED_LAYERS = ("fc1", "head")

_FIRST, _LAST = 128, 64  # outputs of the hidden layers


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network for rows of so many numbers."""
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(prod(shape), _FIRST),
            relu1=nn.ReLU(),
            fc2=nn.Linear(_FIRST, _LAST),
            relu2=nn.ReLU(),
            head=nn.Linear(_LAST, num_classes),
        )
    )
