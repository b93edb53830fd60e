"""Runs the missing cells of an experiment, on shared federations; it can be interrupted at any time."""

import json
import os
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import fedup
from fedup.bench.alone import AloneCheck
from fedup.bench.case import Case
from fedup.bench.experiment import REFERENCE, BenchCell
from fedup.bench.methods import Method, method_class, needs_history
from fedup.bench.metrics import metric
from fedup.bench.results import Results
from fedup.bench.shared_setup import SharedSetup
from fedup.errors import StorageError
from fedup.registry import names
from fedup.tasks.datasets import Dataset
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe

Outcome = Literal["done", "failed", "not supported"]
_ANY, _SHARED = "*", "*"  # federation, and what a group shares in place of a method: no name is like this


@dataclass(frozen=True)
class CellEvent:
    """A cell has ended."""

    cell: BenchCell
    outcome: Outcome
    result: dict[str, Any]
    done: int
    total: int
    left_s: float


class BudgetSpentError(Exception):
    """The time budget is nearly spent; finished cells are kept."""


def run_cells(
    cells: Sequence[BenchCell],
    results: Results,
    *,
    device: str = "cpu",
    progress: Progress,
    budget_s: float | None = None,
    force: bool = False,
    note: str | None = None,
) -> Iterator[CellEvent]:
    """Measure the missing cells: one event for each that ends.

    A cell that fails is recorded with its error, and the others go on.

    Raises BudgetSpentError shortly before the budget is over.
    """
    finished = {cell for cell in cells if results.is_done(cell)}  # raises on a damaged result, before any work
    missing = [cell for cell in cells if force or cell not in finished]
    clock = _Clock(missing, results, cells)
    watched = within(budget_s, progress)
    done = len(cells) - len(missing)
    origin = origin_of(device, note)
    for setup, members in setups(missing, device, watched):
        for cell in members:
            done += 1
            if not force and results.is_done(cell):  # by another process, meanwhile
                clock.note(cell, 0.0, 0.0)
                continue
            check = AloneCheck(device)
            outcome, result = _measure(cell, setup)
            results.save(cell, {**origin, **check.finish().to_json(), **result})
            clock.note(cell, result["wall_s"], setup.made_in_s())
            yield CellEvent(cell, outcome, result, done, len(cells), clock.left_s())
            if done < len(cells):
                watched("", 1, 1)  # a moment to stop at


def setups(cells: Sequence[BenchCell], device: str, show: Progress) -> Iterator[tuple[SharedSetup, list[BenchCell]]]:
    """The cells by group, each group with its shared setup."""
    loaded: dict[Recipe, Dataset] = {}
    for group, members in groupby(cells, key=lambda cell: cell.group):
        left = list(members)
        needed = any(needs_history(cell.method.settings) for cell in left)
        setup = SharedSetup(group, device, show, loaded, with_history=needed)
        yield setup, left
        setup.clear()


def origin_of(device: str, note: str | None) -> dict[str, Any]:
    """Where the results of this process come from."""
    return {"machine": describe_machine(), "device": device, "code": describe_code(), "note": note}


def _measure(cell: BenchCell, setup: SharedSetup) -> tuple[Outcome, dict[str, Any]]:
    """Outcome and result of a cell."""
    method: Method = cell.method.settings
    about: dict[str, Any] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "wall_s": 0.0}
    try:
        setup.make(reference=not isinstance(method, method_class(REFERENCE)))
        started = time.perf_counter()
        if not method.supports(setup.situation.request):
            return "not supported", {**about, "story": setup.situation.story, "not_supported": True}
        unlearned, outputs = setup.answer(method)
        case = Case(unlearned, outputs, original=setup.original, retrained=setup.retrained)
        figures: dict[str, Any] = {}
        for name in names("fedup.bench.metrics"):
            figures |= metric(name).measure(case)
        about["wall_s"] = time.perf_counter() - started
        measured = {
            "story": setup.situation.story,
            "reversible": unlearned.reversible,
            "metrics": figures,
            "cost": unlearned.cost.to_json(),
            "about": dict(unlearned.about),
            **({"shadow": True} if setup.group.shadow else {}),
            **({"shadow_federations": count} if (count := setup.group.shadow_federations) else {}),
        }
        json.dumps(measured, allow_nan=False)  # a method or metric may give what no file can hold
    except (StorageError, BudgetSpentError):
        raise
    except Exception as error:  # whatever a method or a data set does wrong: the other cells go on
        where = traceback.format_exc().replace(f"{Path(fedup.__file__).parents[1]}{os.sep}", "")  # on any machine
        return "failed", {**about, "failed": {"error": type(error).__name__, "message": str(error), "where": where}}
    return "done", {**about, **measured}


class _Clock:
    """Estimates the remaining time from how long cells took, in this run and in stored results."""

    def __init__(self, missing: Sequence[BenchCell], results: Results, cells: Sequence[BenchCell]) -> None:
        self._left = list(missing)
        self._seen: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # by federation, or any, and kind
        for cell in set(cells) - set(missing):
            self._add(cell, cell.method.name, (results.load(cell) or {}).get("wall_s", 0.0))

    def note(self, cell: BenchCell, seconds: float, shared_s: float) -> None:
        """Record the seconds of a cell, and of its group's shared setup."""
        self._add(cell, cell.method.name, seconds)
        self._left.remove(cell)
        if shared_s > 1:
            self._add(cell, _SHARED, shared_s)

    def left_s(self) -> float:
        """Seconds that the remaining cells will take."""
        groups = {cell.group: cell for cell in self._left}
        return sum(self._guess(cell, cell.method.name) for cell in self._left) + sum(
            self._guess(cell, _SHARED) for cell in groups.values()
        )

    def _add(self, cell: BenchCell, kind: str, seconds: float) -> None:
        for federation in (cell.group.federation, _ANY):
            self._seen[federation, kind].append(seconds)

    def _guess(self, cell: BenchCell, kind: str) -> float:
        """The mean of this federation's cells of that kind, else of all federations'."""
        seen = self._seen.get((cell.group.federation, kind)) or self._seen.get((_ANY, kind)) or [0.0]
        return statistics.fmean(seen)


def within(budget_s: float | None, progress: Progress) -> Progress:
    """Progress that stops the run before a step that would exceed the budget."""
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
