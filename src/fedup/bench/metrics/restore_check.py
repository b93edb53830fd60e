"""Whether the original model is back, bit for bit, when the request is taken back."""

import torch

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.models.views import fingerprint
from fedup.tasks.accuracy import predict

COLUMNS = (
    Column(
        "restored",
        "restored",
        "Taken back, weights and logits equal the original's bit for bit.",
        "cost",
        "higher",
        "yes",
        order=27,
    ),
)
_ROWS = 1024  # whole batches, so that the arithmetic is the same to the bit


def measure(case: Case) -> dict[str, float | None]:
    """1 for the same bits, 0 for others, None where there is no way back."""
    if case.unlearned.restore is None:
        return {"restored": None}
    back, original = case.unlearned.restore(), case.original.model
    x = case.data.inputs("test")[0][:_ROWS]
    same = torch.equal(predict(back, x), case.original.logits("test")[:_ROWS])
    same &= fingerprint(back) == fingerprint(original)
    return {"restored": float(same)}
