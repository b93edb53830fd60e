"""ResNet-34 with the usual 3×3 stem for 32×32 images (He et al. 2016)."""

from torch import nn

from fedup.tasks.models.resnet18 import CUTS, FUSED_LAYERS, TRAINING
from fedup.tasks.models.resnet18 import build as build_resnet

__all__ = ["CUTS", "FUSED_LAYERS", "TAKES", "TRAINING", "build"]
TAKES = "image"


def build(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-34; cut it at any stage."""
    return build_resnet(shape, num_classes, blocks=(3, 4, 6, 3))
