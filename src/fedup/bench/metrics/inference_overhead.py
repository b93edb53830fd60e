"""What serving costs after the request."""

import statistics
import time

import torch
from torch import nn

from fedup.bench.case import Case
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "overhead",
        "serving",
        "Time of a forward pass over the original's, batches of 64.",
        "cost",
        "lower",
        "ratio",
        order=23,
        timed=True,
    ),
)
_BATCH, _PAIRS = 64, 11


def measure(case: Case) -> dict[str, float]:
    """As `serving_overhead`."""
    return {"overhead": serving_overhead(case.original.model, case.now.model, case.data.inputs("test")[0])}


@torch.no_grad()
def serving_overhead(original: nn.Module, unlearned: nn.Module, inputs: torch.Tensor) -> float:
    """Calls interleaved, so that drift hits both; median over median."""
    x = inputs[:_BATCH]
    seconds: dict[int, list[float]] = {0: [], 1: []}
    models: list[nn.Module] = [original, unlearned]
    for turn in range(_PAIRS + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            started = _now(x)
            models[which](x)
            seconds[which].append(_now(x) - started)
    return statistics.median(seconds[1][2:]) / statistics.median(seconds[0][2:])


def _now(x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
