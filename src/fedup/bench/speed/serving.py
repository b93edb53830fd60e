"""What a filter costs when the model answers."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from fedup.bench.speed._rows import Row, in_turns
from fedup.bench.speed._settings import RESNET18
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.serving.plugged import Served, plug

_BATCH = 32


def measure(device: torch.device, tell: Callable[[str], None]) -> Iterator[Row]:
    """A ResNet-18 with and without a filter, calls in turns."""
    tell("serving")
    base = RESNET18.build(device).eval()
    plugged = plug(base)
    fitted = Bottleneck(512, 32, nonnegative=True).requires_grad_(False).to(device)
    plugged.serve(Served(fitted, frozenset(), FilterConfig(), plugged.base_fingerprint, plugged.cut))
    x, _ = RESNET18.data(_BATCH, device)
    times = in_turns({"base": _answers(base, x), "plugged": _answers(plugged, x)}, device, repeats=31, warm=2)
    detail = {f"{name}_s": times.median(name) for name in times.of}
    yield Row(f"ResNet-18 with a filter, batch {_BATCH}", times.ratio("plugged", "base"), "× base", 1.02, detail=detail)


def _answers(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def answer() -> None:
        model(x)

    return answer
