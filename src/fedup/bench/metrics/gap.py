"""Gap: every accuracy as the difference to Retrain's."""

from collections.abc import Callable

from fedup.bench.case import Case, Outputs
from fedup.bench.metrics import Column

_ACCURACIES: dict[str, Callable[[Outputs], float | None]] = {
    "gap_r_a": lambda of: of.accuracy("heldout", forgotten=False),
    "gap_f_a": lambda of: of.accuracy("heldout", forgotten=True),
    "gap_f_a_train": lambda of: of.accuracy("forgotten", forgotten=True),
    "gap_test": lambda of: of.accuracy("test", forgotten=False),
}
COLUMNS = (
    Column("gap_r_a", "R-A − Retrain", "R-A less Retrain's, in points.", "closeness", "higher", "points", order=1),
    Column("gap_f_a", "F-A − Retrain", "F-A less Retrain's, in points.", "closeness", "retrain", "points", order=5),
    Column(
        "gap_f_a_train",
        "F-A train − Retrain",
        "F-A on training rows less Retrain's.",
        "closeness",
        "retrain",
        "points",
        order=8,
    ),
    Column(
        "gap_test",
        "test − Retrain",
        "Test accuracy less Retrain's, in points.",
        "closeness",
        "higher",
        "points",
        order=11,
    ),
)


def measure(case: Case) -> dict[str, float | None]:
    """Ours less Retrain's, for each accuracy."""
    gaps: dict[str, float | None] = {}
    for name, accuracy in _ACCURACIES.items():
        ours, reference = accuracy(case.now), accuracy(case.retrained)
        gaps[name] = None if ours is None or reference is None else ours - reference
    return gaps
