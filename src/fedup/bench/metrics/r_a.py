"""R-A: accuracy on what is retained."""

import statistics

import torch

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

COLUMNS = (
    Column("r_a", "R-A", "Accuracy on held-out rows of what is retained, pooled.", "accuracy", "higher", order=2),
    Column("r_a_groups", "R-A, mean", "R-A as a mean over clients, or over classes.", "accuracy", "higher", order=21),
    Column(
        "test", "test", "Accuracy on the official test set, forgotten classes left out.", "accuracy", "higher", order=24
    ),
)


def measure(case: Case) -> dict[str, float | None]:
    """Pooled, as a mean over groups, and on the official test set."""
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
    }
