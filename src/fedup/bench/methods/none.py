"""Control: the original model, as if nobody had asked."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned


@dataclass(frozen=True)
class Method(AnswersAll):
    """Does nothing."""

    def unlearn(self, task: Task) -> Unlearned:
        """The original model."""
        return Unlearned(task.model, Cost(), restore=lambda: task.model, about={"did": "nothing: the original model"})
