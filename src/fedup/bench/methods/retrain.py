"""The reference: the federation learns again from the same first weights, on what is retained."""

from dataclasses import dataclass

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned


@dataclass(frozen=True)
class Method(AnswersAll):
    """Retrain: same first weights, rounds, cohorts and batch orders; the forgotten rows are not there."""

    def unlearn(self, task: Task) -> Unlearned:
        """A model that never saw what is forgotten."""
        cost = Cost()
        rounds = task.recipe.rounds
        model = task.train(task.start, task.retained, rounds=rounds, cost=cost, what="Retrain")
        did = f"{rounds} rounds from the first weights, on what is retained"
        return Unlearned(model, cost, about={"did": did})
