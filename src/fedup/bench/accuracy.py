"""Share of rows classified right."""

import torch
from torch import Tensor, nn

from fedup.cut import logits_of
from fedup.federation import Federation
from fedup.request import Forget


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, *, batch_size: int = 512) -> Tensor:
    """Logits of all rows, batch after batch."""
    return torch.cat([logits_of(model(rows)) for rows in x.split(batch_size)])


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of rows whose largest logit is their label's; NaN where there is no row."""
    return float((predict(model, x).argmax(1) == y).float().mean()) if len(y) else float("nan")


def retain_and_forget(model: nn.Module, federation: Federation, request: Forget) -> dict[str, float]:
    """R-A on held-out rows that the request leaves, F-A on held-out rows that it names.

    Single samples have no held-out counterpart: for them F-A is the accuracy on the forgotten training rows.
    """
    forgotten = federation.forgotten(request, "train" if request.sample_ids else "heldout")
    retained = federation.retained(request, "heldout")
    return {
        "retain": accuracy(model, federation.x[retained], federation.y[retained]),
        "forget": accuracy(model, federation.x[forgotten], federation.y[forgotten]),
    }


def accuracy_per_class(model: nn.Module, x: Tensor, y: Tensor, num_classes: int) -> list[float]:
    """Recall of each class."""
    right = predict(model, x).argmax(1) == y
    return [float(right[y == label].float().mean()) for label in range(num_classes)]
