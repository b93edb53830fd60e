"""What serving costs after the request, and whether the original is back, bit for bit, when it is taken back."""

import torch
from torch import nn

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.bench.turns import in_turns
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
    """Calls in turns, so that drift hits both; median over median."""
    x = inputs[:_BATCH]
    work = {"original": lambda: original(x), "unlearned": lambda: unlearned(x)}
    times = in_turns(work, x.device, repeats=_PAIRS, warm=2)
    return times.median("unlearned") / times.median("original")
