"""F-A: accuracy on what is to be forgotten."""

from typing import Any

from torch.nn.functional import cross_entropy

from fedup.bench.case import Case
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "f_a",
        "F-A",
        "Accuracy on held-out rows of what is forgotten; samples have none.",
        "accuracy",
        "retrain",
        order=4,
    ),
    Column(
        "f_a_train",
        "F-A, train",
        "Accuracy on the forgotten training rows, as labelled.",
        "accuracy",
        "retrain",
        order=17,
    ),
)
_SMALL = 300  # rows whose single values are kept


def measure(case: Case) -> dict[str, Any]:
    """On held-out and on training rows; the losses of the training rows one by one where they are few."""
    rows, labels = case.data.ids("forgotten"), case.data.labels("forgotten")
    figures: dict[str, Any] = {
        "f_a": case.now.accuracy("heldout", forgotten=True),
        "f_a_train": case.now.accuracy("forgotten", forgotten=True),
    }
    if len(rows) <= _SMALL:
        losses = cross_entropy(case.now.logits("forgotten"), labels, reduction="none")
        figures["per_sample"] = {
            "row": rows.tolist(),
            "right": case.now.right("forgotten").int().tolist(),
            "loss": [round(loss, 4) if loss < 1e6 else None for loss in losses.tolist()],
        }
    return figures
