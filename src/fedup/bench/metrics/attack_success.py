"""ASR: how often the trigger gets its way."""

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "asr", "ASR", "Share of triggered rows of other classes that get the backdoor's.", "accuracy", "lower", order=3
    ),
    Column("triggered", "test, triggered", "Accuracy on the test set with the trigger.", "accuracy", "higher", order=9),
)


def measure(case: Case) -> dict[str, float | None]:
    """Attack success, and the accuracy under attack."""
    triggered = case.ground.situation.triggered
    if triggered is None:
        return {"asr": None, "triggered": None}
    others = triggered.y != triggered.target
    led = case.now.logits("triggered").argmax(1)[others] == triggered.target
    return {"asr": share(led), "triggered": share(case.now.right("triggered"))}
