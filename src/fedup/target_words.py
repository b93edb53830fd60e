"""Words for what a model learns: loads no torch."""

from collections.abc import Mapping
from typing import Any, Literal

Targets = Literal["classes", "labels", "values"]
OUTPUT = {"classes": "class", "labels": "label", "values": "output"}  # one of the model's outputs
MEASURE = {"classes": "recall", "labels": "balanced accuracy", "values": "R²"}  # of one output, for the check of harm
SCORE = {"classes": "accuracy", "labels": "accuracy by label", "values": "R²"}  # of a whole model


def targets_of(about: Mapping[str, Any]) -> Targets:
    """What the model of a run folder learns, from what the folder says about it."""
    targets: Targets = about.get("targets", "classes")
    return targets
