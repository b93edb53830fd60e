"""What the cells of a group share: data, situation, trained federation and reference."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from fedup.bench.case import EvaluationData, Outputs
from fedup.bench.experiment import REFERENCE, Group
from fedup.bench.methods import Method, method_class
from fedup.bench.scenarios import Situation
from fedup.bench.shadow import Shadow
from fedup.bench.shadow_federations import ShadowFederations
from fedup.bench.task import Task, Unlearned
from fedup.bench.training_cache import keep, recorded, trained, use_histories
from fedup.errors import DataError
from fedup.models.views import fingerprint
from fedup.tasks.datasets import Dataset, input_of
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe


class SharedSetup:
    """What the cells of a group share, made when first needed."""

    def __init__(
        self,
        group: Group,
        device: str,
        progress: Progress,
        loaded: dict[Recipe, Dataset] | None = None,
        *,
        with_history: bool = True,
    ) -> None:
        self.group, self.device, self._progress, self._with_history = group, device, progress, with_history
        self._loaded = {} if loaded is None else loaded  # the last data set, for groups that have the same
        self._seconds = 0.0
        self._done_with_histories: Callable[[], None] | None = None  # once they are in use

    def make(self, *, reference: bool) -> None:
        """Train what a method needs: the federation, and the reference if asked for."""
        started = time.perf_counter()
        try:
            _ = self.task, self.original.logits("heldout")
            if reference:
                _ = self.retrained.logits("heldout")
        finally:
            self._seconds += time.perf_counter() - started

    def made_in_s(self) -> float:
        """Seconds of `make` since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def dataset(self) -> Dataset:
        recipe = self.group.recipe
        if recipe not in self._loaded:
            self._loaded.clear()
            dataset = recipe.load()
            tensors = {name: getattr(dataset, name).to(self.device) for name in ("x", "y", "test_x", "test_y")}
            self._loaded[recipe] = replace(dataset, **tensors)
        return self._loaded[recipe]

    @cached_property
    def situation(self) -> Situation:
        recipe, dataset = self.group.recipe, self.dataset
        situation: Situation = self.group.scenario.settings.prepare(
            recipe.federation(dataset), dataset=dataset, inputs=input_of(recipe.data), seed=recipe.seed
        )
        situation.federation.check(situation.request)
        return situation

    @cached_property
    def task(self) -> Task:
        situation, recipe = self.situation, self.group.recipe
        start = recipe.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)
        history = None
        if self._done_with_histories is None:  # a task is made again where a method has spoiled it
            self._done_with_histories = use_histories(start, situation.federation, recipe)
        if self.group.recorded and self._with_history:
            model, history = recorded(start, situation.federation, recipe, progress=self._progress)
        else:
            model = trained(start, situation.federation, recipe, progress=self._progress)
        parts, data = (situation.federation, situation.request, model, start.to(self.device), recipe), self.data
        # a probe that held `self` would be a cycle, and keep models and the lock on histories until it is collected
        return Task(*parts, lambda model: Outputs(model, data).moment(), self._progress, history)

    @cached_property
    def data(self) -> EvaluationData:
        recipe, progress = self.group.recipe, self._progress
        parts, count = (self.situation, self.dataset, recipe, progress), self.group.shadow_federations
        shadow, calibration = Shadow(*parts) if self.group.shadow else None, None
        if count:
            calibration = ShadowFederations(*parts, count=count)
        return EvaluationData(self.situation, self.dataset, shadow, calibration)

    @cached_property
    def original(self) -> Outputs:
        return Outputs(self.task.model, self.data)

    @cached_property
    def retrained(self) -> Outputs:
        """The reference: from this run, from the cache, or trained now."""
        task = self.task
        model = trained(task.start, task.retained, task.recipe, progress=self._progress, what="Retrain, the reference")
        return Outputs(model, self.data)

    def answer(self, method: Method) -> tuple[Unlearned, Outputs]:
        """A method's answer to the task; Retrain's model becomes the reference of the others."""
        task = self.task
        before = fingerprint(task.model), fingerprint(task.start)
        unlearned = method.unlearn(task)
        if (fingerprint(task.model), fingerprint(task.start)) != before:
            for name in ("situation", "task", "data", "original", "retrained"):  # other methods get it as it was
                self.__dict__.pop(name, None)
            raise DataError("The method changed the task's own model; it must work on a copy.")
        outputs = Outputs(unlearned.model, self.data)
        if isinstance(method, method_class(REFERENCE)):
            self.retrained = outputs
            keep(unlearned.model, task.start, task.retained, task.recipe)
        return unlearned, outputs

    def clear(self) -> None:
        """Delete the group's histories, unless another process still uses them."""
        if self._done_with_histories is not None:
            self._done_with_histories()
            self._done_with_histories = None
