"""Control: a filter of the same shape with random weights, fitted to nothing."""

from dataclasses import dataclass

import torch

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.task import Task, Unlearned
from fedup.filters.bottleneck import DEFAULT_RANK, Bottleneck, FilterConfig
from fedup.models.features import FeatureReader
from fedup.rng import generator
from fedup.serving.plugged import Served, plug


@dataclass(frozen=True)
class Method(AnswersAll):
    """What the bottleneck does by itself; the default rank is that of the features where they are fewer."""

    rank: int = DEFAULT_RANK
    cut: str | None = None

    def __post_init__(self) -> None:
        self.config()  # checks it

    def config(self) -> FilterConfig:
        """The settings of the filter; the default rank counts as not chosen."""
        return FilterConfig(rank=None if self.rank == DEFAULT_RANK else self.rank)

    def unlearn(self, task: Task) -> Unlearned:
        """The original model behind a random filter."""
        cost = Cost()
        with cost.stage("plug"):
            plugged = plug(task.model, self.cut or task.recipe.cut)
            first = task.federation.rows()[:1]
            nobody = torch.zeros_like(first, dtype=torch.bool)  # a blank row tells the width: nobody's is read
            features = FeatureReader(plugged.base, plugged.cut).read(task.federation.x, first, wanted=nobody)
            source = generator(task.recipe.seed, "random filter")
            width, nonnegative = features.values.shape[1], features.nonnegative
            config = self.config()
            rank = config.rank_for(width)
            random = Bottleneck(width, rank, nonnegative=nonnegative, source=source).requires_grad_(False)
            requests = frozenset([task.request])
            plugged.serve(Served(random, requests, config, plugged.base_fingerprint, plugged.cut))
        did = "a filter with random weights, fitted to nothing"
        return Unlearned(plugged, cost, restore=lambda: plugged.base, about={"did": did})
