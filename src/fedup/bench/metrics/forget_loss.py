"""Loss on what is to be forgotten: finer than accuracy where samples were honest."""

from torch.nn.functional import cross_entropy

from fedup.bench.case import Case, Outputs
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "forget_loss",
        "loss, forgotten",
        "Mean cross-entropy on the forgotten training rows, as labelled.",
        "closeness",
        "retrain",
        "number",
        order=22,
    ),
    Column("gap_forget_loss", "loss − Retrain", "The same less Retrain's.", "closeness", "retrain", "number", order=26),
)


def measure(case: Case) -> dict[str, float | None]:
    """Ours, and ours less Retrain's."""
    ours, reference = _loss(case.now), _loss(case.retrained)
    gap = None if ours is None or reference is None else ours - reference
    return {"forget_loss": ours, "gap_forget_loss": gap}


def _loss(of: Outputs) -> float | None:
    logits, labels = of.logits("forgotten"), of.data.labels("forgotten")
    if not len(labels):
        return None
    loss = float(cross_entropy(logits.double(), labels.long()))
    return loss if loss < 1e6 else None  # a masked logit has none
