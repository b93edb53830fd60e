"""Models, one file each: what it `TAKES` ("image" or "text") and a function `build(shape, num_classes)`."""

from torch import nn

from fedup.registry import find


def build_model(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model of that name for inputs of a shape; weights from torch's global random state."""
    built: nn.Module = find(__name__, name, needs=("build",)).build(shape, num_classes)
    return built
