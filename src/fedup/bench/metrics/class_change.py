"""What a request costs the class that it costs most."""

from fedup.bench.case import Case
from fedup.bench.metrics import Column

_ABOUT = "The largest loss of any retained class in test accuracy, against the original model, in points."
COLUMNS = (Column("class_change", "worst class", _ABOUT, "accuracy", "higher", "points", order=26),)


def measure(case: Case) -> dict[str, float | None]:
    """The least change over classes that are not to be forgotten and have test rows."""
    labels, forgotten = case.data.labels("test"), case.data.to_forget("test")
    gained = case.now.right("test").double() - case.original.right("test").double()
    changes = [float(gained[labels == label].mean()) for label in labels[~forgotten].unique()]
    return {"class_change": min(changes, default=None)}
