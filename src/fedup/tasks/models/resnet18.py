"""ResNet-18 with the usual 3×3 stem for 32×32 images (He et al. 2016)."""

from collections import OrderedDict

from torch import Tensor, nn

TAKES = "image"
CUTS = ("stage1", "stage2", "stage3", "stage4", "pool", "head")
TRAINING = {"lr": 0.02}  # BatchNorm over clients that hold different classes breaks at 0.05
FUSED_LAYERS = ("stage4.0.conv2", "stage4.1.conv1", "stage4.1.conv2", "head")


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


def build(shape: tuple[int, ...], num_classes: int, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> nn.Module:
    """ResNet-18, or with other numbers of blocks a sibling; cut it at any stage."""
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False)),
        ("norm", nn.BatchNorm2d(64)),
        ("relu", nn.ReLU()),
    ]
    width = 64
    for stage, count in enumerate(blocks):
        after, stride = 64 * 2**stage, 1 if stage == 0 else 2
        stack = [Block(width if i == 0 else after, after, stride if i == 0 else 1) for i in range(count)]
        layers.append((f"stage{stage + 1}", nn.Sequential(*stack)))
        width = after
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("head", nn.Linear(width, num_classes))]
    return nn.Sequential(OrderedDict(layers))
