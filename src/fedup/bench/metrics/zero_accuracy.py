"""0A: whether the class that a backdoor leads to is still recognised under the trigger."""

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "zero_a",
        "0A",
        "Recall of the backdoor's class on the test set with the trigger.",
        "accuracy",
        "higher",
        order=4,
    ),
)


def measure(case: Case) -> dict[str, float | None]:
    """Recall of the target class on triggered rows."""
    triggered = case.ground.situation.triggered
    if triggered is None:
        return {"zero_a": None}
    return {"zero_a": share(case.now.right("triggered")[triggered.y == triggered.target])}
