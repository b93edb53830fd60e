"""How much of the way from the original model to Retrain a method goes, on the rows that it is to forget."""

from fedup.bench.case import Case, Outputs
from fedup.bench.metrics import Column
from fedup.bench.metrics.closeness import forget_loss

LEAST_GAP = 0.02  # of accuracy: below it there is little to forget, and nothing is claimed
_ACCURACY = (
    "Share of the gap between the original and Retrain that is closed, in accuracy on the forgotten rows: 1 − the "
    "distance that is left, on either side. No figure where the gap is below 2 points."
)
_LOSS = "The same in mean loss on the forgotten rows."
COLUMNS = (
    Column("closed", "gap closed", _ACCURACY, "closeness", "higher", "number", order=6),
    Column("closed_loss", "loss gap closed", _LOSS, "closeness", "higher", "number", order=7),
)


def measure(case: Case) -> dict[str, float | None]:
    """None where the original and Retrain differ by less than 2 points on the forgotten rows."""
    accuracies = [_accuracy(of) for of in (case.now, case.original, case.retrained)]
    losses = [forget_loss(of) for of in (case.now, case.original, case.retrained)]
    _, known, goal = accuracies
    if known is None or goal is None or abs(known - goal) < LEAST_GAP:
        return {"closed": None, "closed_loss": None}
    return {"closed": _closed(*accuracies), "closed_loss": _closed(*losses)}


def _accuracy(of: Outputs) -> float | None:
    return of.accuracy("forgotten", forgotten=True)


def _closed(now: float | None, original: float | None, retrained: float | None) -> float | None:
    if now is None or original is None or retrained is None or original == retrained:
        return None
    return 1 - abs(now - retrained) / abs(original - retrained)
