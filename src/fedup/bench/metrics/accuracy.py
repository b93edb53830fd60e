"""R-A and F-A: accuracy on what is retained, and on what is to be forgotten."""

import statistics
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

_TEST = "Accuracy on the official test set, forgotten classes left out."
_F_A = "Accuracy on held-out rows of what is forgotten; samples have none."
_F_A_TRAIN = "Accuracy on the forgotten training rows, as labelled."
COLUMNS = (
    Column("r_a", "R-A", "Accuracy on held-out rows of what is retained, pooled.", "accuracy", "higher", order=2),
    Column("f_a", "F-A", _F_A, "accuracy", "retrain", order=4),
    Column("f_a_train", "F-A, train", _F_A_TRAIN, "accuracy", "retrain", order=17),
    Column("r_a_groups", "R-A, mean", "R-A as a mean over clients, or over classes.", "accuracy", "higher", order=21),
    Column("test", "test", _TEST, "accuracy", "higher", order=24),
)
_SMALL = 300  # rows whose single values are kept


def measure(case: Case) -> dict[str, Any]:
    """Pooled, as a mean over groups, on the official test set, and on training rows that are to be forgotten."""
    data = case.data
    right, kept = case.now.right("heldout"), ~data.to_forget("heldout")
    if data.request.class_ids:
        groups = data.labels("heldout")
    else:
        sizes = [len(client.heldout) for client in data.federation.clients]
        groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(kept.device)
    shares = [share(right[kept & (groups == group)]) for group in groups[kept].unique()]
    return {
        "r_a": share(right[kept]),
        "r_a_groups": statistics.fmean(one for one in shares if one is not None) if shares else None,
        "test": case.now.accuracy("test", forgotten=False),
        "f_a": case.now.accuracy("heldout", forgotten=True),
        "f_a_train": case.now.accuracy("forgotten", forgotten=True),
        **_per_sample(case),
    }


def _per_sample(case: Case) -> dict[str, Any]:
    """The losses of the forgotten training rows one by one, where they are few."""
    rows = case.data.ids("forgotten")
    if len(rows) > _SMALL:
        return {}
    losses = cross_entropy(case.now.logits("forgotten"), case.data.labels("forgotten"), reduction="none")
    right = case.now.right("forgotten").int().tolist()
    rounded = [round(loss, 4) if loss < 1e6 else None for loss in losses.tolist()]
    return {"per_sample": {"row": rows.tolist(), "right": right, "loss": rounded}}
