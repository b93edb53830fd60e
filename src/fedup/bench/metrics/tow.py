"""ToW, tug of war: how close a model is to Retrain on all sides at once."""

import math

from fedup.bench.case import Case, Outputs
from fedup.bench.metrics import Column

COLUMNS = (
    Column(
        "tow",
        "ToW",
        "Π (1 − |gap to Retrain|) over forgotten train, retained train and test rows.",
        "closeness",
        "higher",
        order=15,
    ),
)


def measure(case: Case) -> dict[str, float]:
    """1 where the model's accuracies are Retrain's."""
    pairs = zip(_accuracies(case.now), _accuracies(case.retrained), strict=True)
    return {"tow": math.prod(1 - abs(ours - reference) for ours, reference in pairs)}


def _accuracies(of: Outputs) -> list[float]:
    found = (
        of.accuracy("forgotten", forgotten=True),
        of.accuracy("retained", forgotten=False),
        of.accuracy("test", forgotten=False),
    )
    return [one for one in found if one is not None]
