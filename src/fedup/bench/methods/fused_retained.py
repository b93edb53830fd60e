"""FUSED (Zhong et al., CVPR 2025) as its paper describes it: a sparse delta on the layers that learn most, trained on
what is retained alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.methods._deltas import Adapted, LowRank, Sparse, ranking, train_deltas
from fedup.bench.settings import later
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError

GRID = {"lr": (1.0, 0.3), "rounds": (5, 10)}


@dataclass(frozen=True)
class Method(AnswersAll):
    """The `layers` (a share of them) that clients changed most in training get a delta each: some entries, a share
    `density` drawn at random, or a product of two matrices of `rank`. Clients train the deltas alone, by FedAvg for
    `rounds` on what is retained at `lr` times the federation's learning rate, with everything else frozen, BatchNorm's
    statistics included: with those fixed, the full rate may be too high. Without the deltas the original model is back.
    """

    layers: float = 0.7
    density: float = 0.5
    delta: Literal["sparse", "lora"] = "sparse"
    rank: int = 16
    rounds: int = 5
    lr: float = later(1.0)

    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.layers, self.density, self.lr)) or min(self.rank, self.rounds) < 1:
            raise SettingError(
                "layers, density and lr must lie in (0, 1], rank and rounds must be 1 or more; found "
                f"{self.layers}, {self.density}, {self.lr}, {self.rank}, {self.rounds}."
            )

    def unlearn(self, task: Task) -> Unlearned:
        """The frozen model under trained deltas."""
        cost, history = Cost(), task.kept()
        with cost.stage("rank"):
            ranked = ranking(task.model, history)
            chosen = ranked[: max(1, round(self.layers * len(ranked)))]
            start = self.on(task.model, chosen, task.recipe.seed)
        model, entries = train_deltas(task, start, task.retained, rounds=self.rounds, lr=self.lr, cost=cost)
        did = (
            f"deltas of {entries:,} entries on {len(chosen)} of {len(ranked)} layers were trained for {self.rounds} "
            "rounds by the clients that hold retained data; the model under them is frozen"
        )
        return Unlearned(model, cost, restore=lambda: model.base, about={"did": did, "layers": chosen})

    def on(self, model: nn.Module, chosen: Sequence[str], seed: int) -> Adapted:
        """The model under deltas that do nothing yet."""
        make: Any = partial(LowRank, rank=self.rank) if self.delta == "lora" else partial(Sparse, density=self.density)
        return Adapted(model, {name: make(model.get_parameter(name), seed=seed, name=name) for name in chosen})
