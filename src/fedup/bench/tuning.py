"""Hyper-parameters on equal terms: every method's declared grid, the same number of trials, judged on validation rows.

A method declares in its file what is worth trying: `GRID = {"rounds": (1, 2, 3, 5)}`, BUDGET combinations in all.
"""

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fedup.bench.case import Outputs, Rows
from fedup.bench.experiment import Experiment
from fedup.bench.floor import Floor
from fedup.bench.machine import describe_code, describe_machine
from fedup.bench.tuned import BUDGET, Trial, Tuned
from fedup.bench.watching import Progress
from fedup.errors import DataError, SettingError
from fedup.registry import find

TUNING_SEED = 100  # another federation than those of any table


def grid_of(use: str) -> dict[str, tuple[Any, ...]]:
    """The grid that a method's file declares; empty where there is nothing to choose."""
    return dict(getattr(find("fedup.bench.methods", use, needs=("Method",)), "GRID", {}))


def combinations(use: str) -> list[dict[str, Any]]:
    """All settings of a method's grid; the file's own order, in which earlier ones win a tie."""
    grid = grid_of(use)
    found = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not grid:
        raise SettingError(f"{use} declares no GRID: there is nothing to tune.")
    if len(found) > BUDGET:
        raise SettingError(f"{use} declares {len(found)} combinations; every method may try {BUDGET}.")
    return found


def tune_places(
    use: str,
    experiment: Experiment,
    *,
    only: Sequence[str] = (),
    leave_out: Collection[tuple[str, str]] = (),
    seed: int = TUNING_SEED,
    device: str,
    progress: Progress,
) -> Iterator[Tuned]:
    """Try a method's grid in every place of the experiment that it can answer for, but for these places."""
    trials = combinations(use)
    cells = [cell for cell in experiment.cells([seed], only) if cell.method.name == use]
    if not cells:
        raise SettingError(f"{experiment.name} has no method {use}, or none where --only says.")
    for cell in cells:
        place = cell.group.federation, cell.group.scenario.name
        if place in leave_out:
            continue
        floor = Floor(cell.group, device, progress)
        base = next(method.settings for method in experiment.methods if method.name == use)
        if not base.supports(floor.situation.request):
            continue
        goal = accuracies(floor.retrained)
        tried = []
        for settings in trials:
            tried.append(_try(replace(base, **settings), settings, floor, goal))
            progress(f"{use}: {place[0]}, {place[1]}", len(tried), len(trials))
        floor.clear()
        best = max(tried, key=lambda trial: trial.score)
        about = {
            "seed": seed,
            "device": device,
            "accelerator": describe_machine()["accelerator"] if device.startswith("cuda") else "",
            "commit": str(describe_code().get("commit") or "unknown"),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        yield Tuned(*place, best.settings, dict(zip(("r_a", "f_a"), goal, strict=True)), tried, about)


def _try(method: Any, settings: Mapping[str, Any], floor: Floor, goal: tuple[float, float]) -> Trial:
    started = time.perf_counter()
    try:
        found = accuracies(floor.answer(method)[1])
    except DataError as error:  # settings under which training diverges are no good, and the others go on
        return Trial(settings, 0.0, 0.0, 0.0, time.perf_counter() - started, failed=str(error))
    return Trial(settings, score(found, goal), *found, time_s=time.perf_counter() - started)


def accuracies(of: Outputs) -> tuple[float, float]:
    """On validation rows of what is retained, and of what is forgotten: of samples, which have none, the rows
    themselves."""
    rows: Rows = "validation" if bool(of.ground.to_forget("validation").any()) else "forgotten"
    retained, forgotten = of.accuracy("validation", forgotten=False), of.accuracy(rows, forgotten=True)
    return retained or 0.0, forgotten or 0.0


def score(found: tuple[float, float], goal: tuple[float, float]) -> float:
    """1 where nothing retained is lost against Retrain, and what is forgotten is known as well as Retrain knows it.

    >>> score((0.9, 0.0), (0.8, 0.0)), score((0.8, 0.5), (0.8, 0.0))
    (1.0, 0.5)
    """
    (r_a, f_a), (goal_r_a, goal_f_a) = found, goal
    value = (1 - max(0.0, goal_r_a - r_a)) * (1 - abs(f_a - goal_f_a))
    return value if math.isfinite(value) else 0.0
