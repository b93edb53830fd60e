"""The floor: a second Retrain with other seeds; no method can be asked to be closer to Retrain than this."""

from dataclasses import dataclass, replace
from functools import partial

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError


@dataclass(frozen=True)
class Method(AnswersAll):
    """Retrain on the same rows at the same clients, with first weights, cohorts and batches of another seed."""

    other_seed: int = 1000  # added to the federation's own

    def __post_init__(self) -> None:
        if self.other_seed < 1:
            raise SettingError(f"other_seed must be 1 or more; found {self.other_seed}: 0 would be Retrain itself.")

    def unlearn(self, task: Task) -> Unlearned:
        """Another model that never saw what is forgotten."""
        cost = Cost()
        recipe = replace(task.recipe, seed=task.recipe.seed + self.other_seed)
        federation = task.federation
        start = recipe.blank_model(federation.x.shape[1:], federation.num_classes).to(federation.x.device)
        train = partial(replace(task, recipe=recipe).train, start, task.retained)
        model = train(rounds=recipe.rounds, cost=cost, what="Retrain, other seeds")
        did = f"{recipe.rounds} rounds on what is retained, with first weights, cohorts and batches of another seed"
        return Unlearned(model, cost, about={"did": did})
