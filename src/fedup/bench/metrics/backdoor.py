"""What a backdoor's trigger still does: ASR, 0A, PS, and the accuracy under attack."""

from fedup.bench.case import Case, share
from fedup.bench.metrics import Column

_ASR = "Share of triggered rows of other classes that get the backdoor's."
_ZERO_A = "Recall of the backdoor's class on the test set with the trigger."
_PS = "Precision of the backdoor's class on the test set with the trigger."
_TRIGGERED = "Accuracy on the test set with the trigger."
COLUMNS = (
    Column("asr", "ASR", _ASR, "accuracy", "lower", order=7),
    Column("zero_a", "0A", _ZERO_A, "accuracy", "higher", order=12),
    Column("ps", "PS", _PS, "accuracy", "higher", order=14),
    Column("triggered", "test, triggered", _TRIGGERED, "accuracy", "higher", order=25),
)


def measure(case: Case) -> dict[str, float | None]:
    """On triggered test rows; None where nothing carries a trigger."""
    triggered = case.data.situation.triggered
    if triggered is None:
        return {column.key: None for column in COLUMNS}
    of_target, right = triggered.y == triggered.target, case.now.right("triggered")
    named = case.now.logits("triggered").argmax(1) == triggered.target
    return {
        "asr": share(named[~of_target]),
        "zero_a": share(right[of_target]),
        "ps": share(right[named]),
        "triggered": share(right),
    }
