"""Share of rows classified right."""

import torch
from torch import Tensor, nn

from fedup.federation import Federation
from fedup.models.cut import logits_of
from fedup.request import Forget


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, rows: Tensor | None = None, *, batch_size: int = 512) -> Tensor:
    """Logits of the rows chosen, or of all, batch after batch: no second array of the data's size."""
    if rows is None:
        return torch.cat([logits_of(model(batch)) for batch in x.split(batch_size)])
    return torch.cat([logits_of(model(x[batch])) for batch in rows.split(batch_size)])


def accuracy(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor | None = None) -> float:
    """Share of the rows (chosen, or all) whose largest logit is their label's; NaN where there is no row."""
    labels = y if rows is None else y[rows]
    return float((predict(model, x, rows).argmax(1) == labels).float().mean()) if len(labels) else float("nan")


def retain_and_forget(model: nn.Module, federation: Federation, request: Forget) -> dict[str, float]:
    """R-A on held-out rows that the request leaves, F-A on held-out rows that it names.

    Single samples have no held-out counterpart: for them F-A is the accuracy on the forgotten training rows.
    """
    forgotten = federation.forgotten(request, "train" if request.sample_ids else "heldout")
    retained = federation.retained(request, "heldout")
    return {
        "retain": accuracy(model, federation.x, federation.y, retained),
        "forget": accuracy(model, federation.x, federation.y, forgotten),
    }


def accuracy_per_class(model: nn.Module, x: Tensor, y: Tensor, num_classes: int) -> list[float]:
    """Recall of each class."""
    right = predict(model, x).argmax(1) == y
    return [float(right[y == label].float().mean()) for label in range(num_classes)]
