"""How far the loss of recall that a server expects of each class is from the loss on test rows."""

import statistics

from fedup.bench.case import Case
from fedup.bench.metrics import Column

_ABOUT = "The loss of each retained class's recall, as a server expects it where nobody counts, less that on test rows"
COLUMNS = (
    Column("recall_error", "recall, misjudged", f"{_ABOUT}: median size.", "accuracy", "lower", "points", order=48),
    Column("recall_error_most", "recall, most", f"{_ABOUT}: the largest.", "accuracy", "lower", "points", order=49),
)


def measure(case: Case) -> dict[str, float | None]:
    """None where nothing was estimated."""
    expected: dict[str, float] = case.unlearned.about.get("expected_loss") or {}
    labels = case.data.labels("test")
    lost = case.original.right("test").double() - case.now.right("test").double()
    errors = [
        abs(loss / 100 - float(lost[labels == int(label)].mean()))
        for label, loss in expected.items()
        if bool((labels == int(label)).any())
    ]
    return {
        "recall_error": statistics.median(errors) if errors else None,
        "recall_error_most": max(errors, default=None),
    }
