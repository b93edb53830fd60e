"""What a filter may cost to be put in force."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedup.errors import SettingError
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, Served, plug
from fedup.unlearning.plan import Terms

# Accuracies by state of the model (original, forgotten, restored), part of the data and side (retain, forget).
Figures = Mapping[str, Any]
Judge = Callable[[PluggedModel, Collection[Forget]], Figures]  # measures a model for the requests in force


@dataclass(frozen=True)
class Limits:
    """What a filter may cost to be put in force, in points: retained validation accuracy (None: not measured), and each
    class's recall on retained rows. `force` lifts both limits."""

    max_loss: float | None = 3.0
    force: bool = False
    max_class_loss: float = 5.0

    def __post_init__(self) -> None:
        if self.max_loss is not None and not self.max_loss >= 0:  # NaN would allow everything
            raise SettingError(f"max_loss, in points of accuracy, must be 0 or more; found {self.max_loss}.")

    def refusal(self, figures: Figures | None) -> str | None:
        """Why the filter may not be put in force, in words; None when it may."""
        if self.force or self.max_loss is None:
            return None
        states, score = ("original", "forgotten"), figures.get("score", "accuracy") if figures else "accuracy"
        before, after = (figures[state]["validation"]["retain"] if figures else None for state in states)
        if before is None or after is None:
            return f"the retained {score} could not be measured, because there is no validation data at hand"
        loss = 100 * (before - after)
        if loss <= self.max_loss:
            return None
        return (
            f"it would lower the retained {score} on validation data by {loss:.1f} points "
            f"({before:.3f} to {after:.3f}), and {self.max_loss:g} are allowed"
        )

    def terms(self, judge: Judge | None, plugged: PluggedModel, *, keep_sealed: bool = False) -> Terms:
        """Terms by which no filter with a delta is made that these limits would not put in force."""

        def refusal(served: Served) -> str | None:
            assert judge is not None
            trial = plug(plugged.base, plugged.cut)
            trial.serve(served)
            return self.refusal(judge(trial, served.requests))

        measured = judge is not None and self.max_loss is not None and not self.force
        return Terms(self.max_class_loss, keep_sealed=keep_sealed, refusal=refusal if measured else None)
