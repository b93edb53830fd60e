"""What serving costs after the request, and whether the original is back, bit for bit, when it is taken back."""

import statistics
import time

import torch
from torch import nn

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.models.views import fingerprint
from fedup.tasks.evaluation import predict

_OVERHEAD = "Time of a forward pass over the original's, batches of 64."
_RESTORED = "Taken back, weights and logits equal the original's bit for bit."
COLUMNS = (
    Column("overhead", "serving", _OVERHEAD, "cost", "lower", "ratio", order=23, timed=True),
    Column("restored", "restored", _RESTORED, "cost", "higher", "yes", order=27),
)
_BATCH, _PAIRS = 64, 11
_ROWS = 1024  # whole batches, so that the arithmetic is the same to the bit


def measure(case: Case) -> dict[str, float | None]:
    """As `serving_overhead`; restored is 1 for the same bits, 0 for others, None where there is no way back."""
    inputs, original = case.data.inputs("test")[0], case.original
    figures: dict[str, float | None] = {"overhead": serving_overhead(original.model, case.now.model, inputs)}
    if case.unlearned.restore is None:
        return {**figures, "restored": None}
    back = case.unlearned.restore()
    same = torch.equal(predict(back, inputs[:_ROWS]), original.logits("test")[:_ROWS])
    return {**figures, "restored": float(same and fingerprint(back) == fingerprint(original.model))}


@torch.no_grad()
def serving_overhead(original: nn.Module, unlearned: nn.Module, inputs: torch.Tensor) -> float:
    """Calls interleaved, so that drift hits both; median over median."""
    x = inputs[:_BATCH]
    models, seconds = (original, unlearned), (list[float](), list[float]())
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
