"""Control: the original model, as if nobody had asked."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.task import Task, Unlearned
from fedup.request import Forget


@dataclass(frozen=True)
class Method:
    """Does nothing."""

    def supports(self, request: Forget) -> bool:
        """Any request can be ignored."""
        return True

    def unlearn(self, task: Task) -> Unlearned:
        """The original model."""
        return Unlearned(task.model, Cost(), restore=lambda: task.model, about={"did": "nothing: the original model"})
