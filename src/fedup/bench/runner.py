"""Runs an experiment: cell by cell, only what is missing, from shared federations; interrupt it anywhere."""

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any, Literal

from fedup.bench.case import Case, Ground, Outputs
from fedup.bench.datasets import Dataset, input_of
from fedup.bench.experiment import REFERENCE, Cell, Group
from fedup.bench.machine import describe_code, describe_machine
from fedup.bench.methods import Method, method_class
from fedup.bench.metrics import metric
from fedup.bench.probe import figures_of
from fedup.bench.recipe import Recipe
from fedup.bench.results import Results
from fedup.bench.scenarios import Situation
from fedup.bench.task import Task, Unlearned
from fedup.bench.trained import keep, recorded, trained
from fedup.bench.watching import Progress
from fedup.errors import DataError, StorageError
from fedup.registry import names
from fedup.sharing import fingerprint

Outcome = Literal["done", "failed", "not supported"]


@dataclass(frozen=True)
class Event:
    """A cell is over."""

    cell: Cell
    outcome: Outcome
    result: dict[str, Any]
    done: int
    total: int
    left_s: float


class BudgetSpentError(Exception):
    """The time given is nearly over; what is finished is kept."""


def run_cells(
    cells: Sequence[Cell],
    results: Results,
    *,
    device: str = "cpu",
    progress: Progress,
    budget_s: float | None = None,
    force: bool = False,
    note: str | None = None,
) -> Iterator[Event]:
    """Measure what is missing: one event for each cell that is over.

    A cell that fails is recorded with its error, and the others go on.

    Raises BudgetSpentError shortly before the budget is over.
    """
    results.check(cells)
    missing = [cell for cell in cells if force or not results.is_done(cell)]
    clock = _Clock(missing, results, cells)
    watched = _within(budget_s, progress)
    done = len(cells) - len(missing)
    loaded: dict[Recipe, Dataset] = {}
    origin = {"machine": describe_machine(), "device": device, "code": describe_code(), "note": note}  # of this process
    for group, members in groupby(missing, key=lambda cell: cell.group):
        floor = _Floor(group, device, watched, loaded)
        for cell in members:
            if not force and results.is_done(cell):  # by another process, meanwhile
                clock.note(cell, 0.0, 0.0)
                done += 1
                continue
            outcome, result = _measure(cell, floor)
            results.save(cell, {**origin, **result})
            clock.note(cell, result["wall_s"], floor.made_in_s())
            done += 1
            yield Event(cell, outcome, result, done, len(cells), clock.left_s())
            if done < len(cells):
                watched("", 1, 1)  # a moment to stop at
        floor.clear()


def _measure(cell: Cell, floor: "_Floor") -> tuple[Outcome, dict[str, Any]]:
    """Outcome and result of a cell."""
    method: Method = cell.method.settings
    about: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": 0.0,
    }
    try:
        floor.make(reference=not isinstance(method, method_class(REFERENCE)))
        started = time.perf_counter()
        if not method.supports(floor.situation.request):
            return "not supported", {**about, "story": floor.situation.story, "not_supported": True}
        unlearned, outputs = floor.answer(method)
        case = Case(unlearned, outputs, original=floor.original, retrained=floor.retrained)
        figures: dict[str, Any] = {}
        for name in names("fedup.bench.metrics"):
            figures |= metric(name).measure(case)
        about["wall_s"] = time.perf_counter() - started
        measured = {
            "story": floor.situation.story,
            "reversible": unlearned.reversible,
            "metrics": figures,
            "cost": unlearned.cost.to_json(),
            "about": dict(unlearned.about),
        }
        json.dumps(measured, allow_nan=False)  # a method or metric may give what no file can hold
    except (StorageError, BudgetSpentError):
        raise
    except Exception as error:  # whatever a method or a data set does wrong: the other cells go on
        return "failed", {
            **about,
            "failed": {"error": type(error).__name__, "message": str(error), "where": traceback.format_exc()},
        }
    return "done", {**about, **measured}


class _Floor:
    """What the cells of a group share, made when first needed."""

    def __init__(
        self, group: Group, device: str, progress: Progress, loaded: dict[Recipe, Dataset] | None = None
    ) -> None:
        self.group, self.device, self._progress = group, device, progress
        self._loaded = {} if loaded is None else loaded  # the last data set, for groups that have the same
        self._made: dict[str, Any] = {}
        self._seconds = 0.0

    def make(self, *, reference: bool) -> None:
        """Train what a method needs to be there; the reference too, unless the method is it."""
        started = time.perf_counter()
        try:
            _ = self.task, self.original.logits("heldout")
            if reference:
                _ = self.retrained.logits("heldout")
        finally:
            self._seconds += time.perf_counter() - started

    def made_in_s(self) -> float:
        """Seconds spent on making things since last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def dataset(self) -> Dataset:
        recipe = self.group.recipe
        if recipe not in self._loaded:
            self._loaded.clear()
            self._loaded[recipe] = _on(recipe.load(), self.device)
        return self._loaded[recipe]

    @property
    def situation(self) -> Situation:
        return self._once("situation", self._prepare)

    @property
    def task(self) -> Task:
        return self._once("task", self._task)

    @property
    def ground(self) -> Ground:
        return self._once("ground", lambda: Ground(self.situation, self.dataset))

    @property
    def original(self) -> Outputs:
        return self._once("original", lambda: Outputs(self.task.model, self.ground))

    @property
    def retrained(self) -> Outputs:
        """The reference: from this run, from the cache, or made now."""
        return self._once("retrained", self._retrain)

    def answer(self, method: Method) -> tuple[Unlearned, Outputs]:
        """What a method makes of the task; Retrain's model is kept as the reference of the others."""
        task = self.task
        before = fingerprint(task.model), fingerprint(task.start)
        unlearned = method.unlearn(task)
        if (fingerprint(task.model), fingerprint(task.start)) != before:
            self._made.clear()  # other methods get it as it was
            raise DataError("The method changed the task's own model; it must work on a copy.")
        outputs = Outputs(unlearned.model, self.ground)
        if isinstance(method, method_class(REFERENCE)):
            self._made["retrained"] = outputs
            keep(unlearned.model, task.start, task.federation.without(task.request), task.recipe)
        return unlearned, outputs

    def clear(self) -> None:
        """All cells of the group are over: its histories go, which may be many times the model's size."""
        task: Task | None = self._made.get("task")
        for history in task.histories() if task else ():
            history.remove()

    def _prepare(self) -> Situation:
        recipe, dataset = self.group.recipe, self.dataset
        honest = recipe.federation(dataset)
        situation: Situation = self.group.scenario.settings.prepare(
            honest, dataset=dataset, inputs=input_of(recipe.data), seed=recipe.seed
        )
        situation.federation.check(situation.request)
        return situation

    def _task(self) -> Task:
        situation, recipe = self.situation, self.group.recipe
        start = recipe.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)
        history = None
        if self.group.recorded:
            model, history = recorded(start, situation.federation, recipe, progress=self._progress)
        else:
            model = trained(start, situation.federation, recipe, progress=self._progress)
        probe = partial(figures_of, ground=self.ground)
        start = start.to(self.device)
        return Task(situation.federation, situation.request, model, start, recipe, probe, self._progress, history)

    def _retrain(self) -> Outputs:
        task = self.task
        retained = task.federation.without(task.request)
        model = trained(task.start, retained, task.recipe, progress=self._progress, what="Retrain, the reference")
        return Outputs(model, self.ground)


def _on(dataset: Dataset, device: str) -> Dataset:
    tensors = {name: getattr(dataset, name).to(device) for name in ("x", "y", "test_x", "test_y")}
    return replace(dataset, **tensors)


class _Clock:
    """How long the rest will take, from how long cells took: in this run, or in those whose results are there."""

    def __init__(self, missing: Sequence[Cell], results: Results, cells: Sequence[Cell]) -> None:
        self._left = list(missing)
        self._seen: dict[tuple[str, ...], list[float]] = {}
        for cell in set(cells) - set(missing):
            self._add(_kinds(cell), (results.load(cell) or {}).get("wall_s", 0.0))

    def note(self, cell: Cell, seconds: float, shared_s: float) -> None:
        """A cell took so many seconds, and what its group shares so many more."""
        self._add(_kinds(cell), seconds)
        self._left.remove(cell)
        if shared_s > 1:
            self._add([("shared", cell.group.federation), ("shared",)], shared_s)

    def left_s(self) -> float:
        """Seconds that the rest will take."""
        groups = {cell.group: cell.group.federation for cell in self._left}
        shared = [self._guess([("shared", federation), ("shared",)]) for federation in groups.values()]
        return sum(self._guess(_kinds(cell)) for cell in self._left) + sum(shared)

    def _add(self, kinds: Sequence[tuple[str, ...]], seconds: float) -> None:
        for kind in kinds:
            self._seen.setdefault(kind, []).append(seconds)

    def _guess(self, kinds: Sequence[tuple[str, ...]]) -> float:
        return next((statistics.fmean(self._seen[kind]) for kind in kinds if kind in self._seen), 0.0)


def _kinds(cell: Cell) -> list[tuple[str, ...]]:
    """What may take as long as this cell, from like to unlike."""
    return [(cell.group.federation, cell.method.name), ("any", cell.method.name)]


def _within(budget_s: float | None, progress: Progress) -> Progress:
    """Progress that stops the run when the next step would not end within the budget."""
    if budget_s is None:
        return progress
    started = last = time.perf_counter()
    longest = 0.0

    def watched(what: str, done: int, total: int) -> None:
        nonlocal last, longest
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if now - started + longest > budget_s:
            raise BudgetSpentError
        progress(what, done, total)

    return watched
