"""How far the outputs on forgotten inputs are from Retrain's."""

from fedup.bench.case import Case, Rows
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "tv",
        "TV to Retrain",
        "Total variation between outputs and Retrain's on forgotten inputs.",
        "closeness",
        "lower",
        order=18,
    ),
    Column(
        "kl",
        "KL to Retrain",
        "KL divergence of outputs from Retrain's on forgotten inputs.",
        "closeness",
        "lower",
        "ratio",
        order=20,
    ),
)
_LEAST = 1e-9  # a probability below it counts as this one, so that one struck-out class does not make KL infinite


def measure(case: Case) -> dict[str, float | None]:
    """Means over held-out forgotten inputs; over the forgotten samples themselves where only samples are named."""
    rows: Rows = "heldout" if bool(case.data.to_forget("heldout").any()) else "forgotten"
    named = case.data.to_forget(rows)
    ours, reference = (of.probabilities(rows)[named] for of in (case.now, case.retrained))
    logs = [one.clamp(min=_LEAST).log() for one in (reference, ours)]
    return {
        "tv": float((ours - reference).abs().sum(1).mean() / 2),
        "kl": float((reference * (logs[0] - logs[1])).sum(1).mean()),
    }
