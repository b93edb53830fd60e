"""What every unlearning method gets, and what it gives back."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fedup.bench.cost import Cost, Meter, Probe
from fedup.bench.history import History
from fedup.bench.training_cache import LEARNING, recorded
from fedup.clients.collect import collect_cells
from fedup.clients.in_process import InProcess
from fedup.errors import DataError
from fedup.federation import Federation
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.store import Centroids
from fedup.tasks.progress import Progress, RoundsShown
from fedup.tasks.recipe import Recipe
from fedup.training.averaging import RunningAverage
from fedup.training.fedavg import Averaging, Observer
from fedup.training.local import LocalTraining


@dataclass(frozen=True, eq=False)
class Task:
    """A trained federation and a request. Methods must not change it: others get the same."""

    federation: Federation  # as it learned, harm included
    request: Forget
    model: nn.Module  # what it learned
    start: nn.Module  # the weights it started from
    recipe: Recipe  # how it learned
    probe: Probe  # figures of an intermediate model, for `Cost.path`
    progress: Progress
    history: History | None = None  # of the training, where a method of the experiment needs it
    _collected: dict[tuple[Any, ...], tuple[Centroids, float]] = field(default_factory=dict)
    _learned: dict[str, tuple[nn.Module, History]] = field(default_factory=dict)

    @property
    def retained(self) -> Federation:
        """The federation without what is to be forgotten."""
        return self.federation.without(self.request)

    def train(
        self,
        model: nn.Module,
        federation: Federation,
        *,
        rounds: int | Sequence[int],
        cost: Cost,
        what: str,
        local: LocalTraining | None = None,
        averaging: Averaging = RunningAverage,
    ) -> nn.Module:
        """FedAvg as the federation did it: same cohorts and batches, other rows or other first weights."""
        recipe = self.recipe
        watchers: list[Observer] = [
            RoundsShown(self.progress, what, rounds),
            Meter(cost, federation, local or recipe.local, self.probe),
        ]
        with cost.stage("train"):
            return recipe.train(
                model, federation, rounds=rounds, local=local, averaging=averaging, observers=watchers
            ).model

    def train_after(self, model: nn.Module, *, rounds: int, cost: Cost, what: str) -> nn.Module:
        """More rounds after those of the training, on what is retained."""
        last = self.recipe.rounds
        return self.train(model, self.retained, rounds=range(last, last + rounds), cost=cost, what=what)

    def kept(self) -> History:
        """The history of the training."""
        if self.history is None or not self.history.rounds:
            raise DataError("This method needs the history of the training, and none was kept of any round.")
        return self.history

    def forget_learned(self) -> None:
        """Delete the histories of trainings with other averages."""
        for _, history in self._learned.values():
            history.remove()
        self._learned.clear()

    def learned_otherwise(self, averaging: Averaging, *, named: str) -> tuple[nn.Module, History]:
        """The same federation, trained from the same first weights with another average, before any request. `named`
        identifies it in the cache."""
        if named not in self._learned:
            learn = partial(recorded, self.start, self.federation, self.recipe, progress=self.progress)
            self._learned[named] = learn(what=f"{LEARNING} with {named}", averaging=averaging, named=named)
        return self._learned[named]

    def collect(
        self,
        *,
        statistics: CentroidConfig | DP | MomentConfig | None = None,
        cut: str | None = None,
        cost: Cost,
    ) -> Centroids:
        """The centroids of everything, as clients send them once, ahead of any request; the caller's own copy."""
        config = CentroidConfig() if statistics is None else statistics
        config = replace(config, seed=self.recipe.seed) if isinstance(config, CentroidConfig) else config
        key = config, cut
        if key not in self._collected:
            started = time.perf_counter()
            contact = InProcess(self.federation, self.model, one_reader=True)
            collected = collect_cells(self.model, contact, config, cut, frozenset(), with_forgotten=False)
            self._collected[key] = collected, time.perf_counter() - started
        centroids, seconds = self._collected[key]
        cost.ahead_time_s += seconds
        cost.ahead_bytes_up += centroids.size_bytes
        cost.storage_bytes += centroids.stored_bytes
        return copy.deepcopy(centroids)


@dataclass(frozen=True, eq=False)
class Unlearned:
    """An unlearned model, its cost, and how to undo it where that is possible."""

    model: nn.Module
    cost: Cost
    restore: Callable[[], nn.Module] | None = None  # gives the original model
    about: Mapping[str, Any] = field(default_factory=dict)  # what else the method says of its answer: plain data

    @property
    def reversible(self) -> bool:
        """Whether the original model can be restored."""
        return self.restore is not None
