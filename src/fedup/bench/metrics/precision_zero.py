"""PS: how often an answer is right that names the class a backdoor leads to."""

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "ps", "PS", "Precision of the backdoor's class on the test set with the trigger.", "accuracy", "higher", order=5
    ),
)


def measure(case: Case) -> dict[str, float | None]:
    """Precision of the target class on triggered rows."""
    triggered = case.ground.situation.triggered
    if triggered is None:
        return {"ps": None}
    named = case.now.logits("triggered").argmax(1) == triggered.target
    return {"ps": share(case.now.right("triggered")[named])}
