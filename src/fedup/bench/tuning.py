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
from fedup.bench.runner import setups
from fedup.bench.shared_setup import SharedSetup
from fedup.bench.tuned import BUDGET, Trial, Tuned
from fedup.errors import DataError, SettingError
from fedup.registry import find
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress

TUNING_SEED = 100  # another federation than those of any table


def grid_of(use: str) -> dict[str, tuple[Any, ...]]:
    """The grid that a method's file declares; empty where there is nothing to choose."""
    return dict(getattr(find("fedup.bench.methods", use, needs=("Method",)), "GRID", {}))


def combinations(use: str) -> list[dict[str, Any]]:
    """All settings of a method's grid; the file's own order, in which earlier ones win a tie."""
    grid = grid_of(use)
    tried = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not grid:
        raise SettingError(f"{use} declares no GRID: there is nothing to tune.")
    if len(tried) > BUDGET:
        raise SettingError(f"{use} declares {len(tried)} combinations; every method may try {BUDGET}.")
    return tried


def tunable(experiment: Experiment) -> list[str]:
    """The methods of an experiment that declare a grid."""
    return [method.name for method in experiment.methods if method.name == method.use and grid_of(method.use)]


def tune_places(
    uses: Sequence[str],
    experiment: Experiment,
    *,
    only: Sequence[str] = (),
    leave_out: Collection[tuple[str, str, str]] = (),
    seed: int = TUNING_SEED,
    device: str,
    progress: Progress,
) -> Iterator[tuple[str, Tuned]]:
    """Try the methods' grids in every place of the experiment that they support, except `leave_out` (federation,
    scenario, method); place by place, so that each federation is trained once."""
    grids = {use: combinations(use) for use in uses}
    cells = experiment.cells([seed], only)
    for use in uses:
        if not any(cell.method.name == use for cell in cells):
            raise SettingError(f"{experiment.name} has no method {use}, or none where --only says.")
    bases = {method.name: method.settings for method in experiment.methods}
    about = {
        "seed": seed,
        "device": device,
        "accelerator": str(describe_machine()["accelerator"] or "") if device.startswith("cuda") else "",
        "commit": str(describe_code().get("commit") or "unknown"),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for setup, members in setups(cells, device, progress):
        place = setup.group.federation, setup.group.scenario.name
        for use in [cell.method.name for cell in members if cell.method.name in uses]:
            if (*place, use) in leave_out or not bases[use].supports(setup.situation.request):
                continue
            goal = accuracies(setup.retrained)
            tried = []
            for settings in grids[use]:
                tried.append(_try(replace(bases[use], **settings), settings, setup, goal))
                progress(f"{use}: {place[0]}, {place[1]}", len(tried), len(grids[use]))
            best = max(tried, key=lambda trial: trial.score)
            yield use, Tuned(*place, best.settings, dict(zip(("r_a", "f_a"), goal, strict=True)), tried, about)


def _try(method: Any, settings: Mapping[str, Any], setup: SharedSetup, goal: tuple[float, float]) -> Trial:
    started = time.perf_counter()
    try:
        found = accuracies(setup.answer(method)[1])
    except DataError as error:  # settings under which training diverges are no good, and the others go on
        return Trial(settings, 0.0, 0.0, 0.0, time.perf_counter() - started, failed=str(error))
    finally:
        setup.task.forget_learned()  # no other method uses this training
    return Trial(settings, score(found, goal), *found, time_s=time.perf_counter() - started)


def accuracies(of: Outputs) -> tuple[float, float]:
    """On validation rows of what is retained and of what is forgotten; samples have none, so their own rows count."""
    rows: Rows = "validation" if bool(of.data.to_forget("validation").any()) else "forgotten"
    retained, forgotten = of.accuracy("validation", forgotten=False), of.accuracy(rows, forgotten=True)
    return retained or 0.0, forgotten or 0.0


def score(found: tuple[float, float], goal: tuple[float, float]) -> float:
    """(1 + R-A − Retrain's) · (1 − |F-A − Retrain's|).

    >>> score((0.8, 0.0), (0.8, 0.0)), score((0.8, 0.5), (0.8, 0.0)), score((0.3, 0.0), (0.8, 0.0))
    (1.0, 0.5, 0.5)
    """
    (r_a, f_a), (goal_r_a, goal_f_a) = found, goal
    value = (1 + (r_a - goal_r_a)) * (1 - abs(f_a - goal_f_a))
    return value if math.isfinite(value) else 0.0
