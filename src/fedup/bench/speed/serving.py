"""What a filter costs when the model answers."""

from collections.abc import Iterator

import torch

from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import RESNET18
from fedup.bench.turns import in_turns
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.serving.plugged import Served, plug

_BATCH = 32


@torch.no_grad()
def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """A ResNet-18 with and without a filter, calls in turns."""
    tell("serving")
    base = RESNET18.build(device).eval()
    plugged = plug(base)
    fitted = Bottleneck(512, 32, nonnegative=True).requires_grad_(False).to(device)
    plugged.serve(Served(fitted, frozenset(), FilterConfig(), plugged.base_fingerprint, plugged.cut))
    x, _ = RESNET18.data(_BATCH, device)
    times = in_turns({"base": lambda: base(x), "plugged": lambda: plugged(x)}, device, repeats=31, warm=2)
    name, over = f"ResNet-18 with a filter, batch {_BATCH}", times.ratio("plugged", "base")
    yield Row(name, over, "× base", 1.02, detail=times.medians())
