"""Control: a few more rounds of FedAvg on what is retained."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError

GRID = {"rounds": (1, 2, 3, 5)}


@dataclass(frozen=True)
class Method(AnswersAll):
    """Train on for `rounds` without the data, and hope that it fades."""

    rounds: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise SettingError(f"rounds must be 1 or more; found {self.rounds}.")

    def unlearn(self, task: Task) -> Unlearned:
        """The original model, trained on."""
        cost = Cost()
        model = task.train(task.model, task.retained, rounds=self.rounds, cost=cost, what="Fine-tune")
        return Unlearned(model, cost, about={"did": f"{self.rounds} more rounds of FedAvg on what is retained"})
