"""Clean times: one process on an idle device, a warm-up, then the median of three runs; nothing else is measured again.

Times are those of `Cost`: from the request to the final model, by stage, without probes. Trained federations, their
histories and what clients sent ahead of the request exist before. Time ahead is taken separately.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from torch import nn

from fedup.bench.alone import AloneCheck
from fedup.bench.cost import Cost
from fedup.bench.experiment import REFERENCE, BenchCell
from fedup.bench.metrics.serving import serving_overhead
from fedup.bench.results import Results
from fedup.bench.runner import BudgetSpentError, origin_of, setups, within
from fedup.bench.shared_setup import SharedSetup
from fedup.bench.task import Task
from fedup.errors import StorageError
from fedup.tasks.machine import describe_machine
from fedup.tasks.progress import Progress

REPEATS = 3
_LAST = 9
_SCENARIOS = {"client": 0, "class": 1}  # first comes what the paper compares times for: time may be scarce
_METHODS = {REFERENCE: 0, "fedup": 1}  # a ratio needs both


@dataclass(frozen=True)
class TimedEvent:
    """A cell has ended: its times, or the error."""

    cell: BenchCell
    timing: Mapping[str, Any]
    error: str
    done: int
    total: int


def is_clean(timing: Mapping[str, Any] | None) -> bool:
    """Whether these times count: at least three, on a device that nobody else used."""
    return timing is not None and timing.get("alone") is True and len(timing.get("runs", ())) >= REPEATS


def in_order(cells: Sequence[BenchCell]) -> list[BenchCell]:
    """Federation by federation as the experiment has them; clients, classes, then the rest; Retrain and FedUP first."""
    federations = list(dict.fromkeys(cell.group.federation for cell in cells))
    return sorted(
        cells,
        key=lambda cell: (
            federations.index(cell.group.federation),
            cell.group.recipe.seed,
            _SCENARIOS.get(cell.group.scenario.name, _LAST),
            cell.group.scenario.name,
            _METHODS.get(cell.method.name, _LAST),
        ),
    )


def finished(cells: Sequence[BenchCell], results: Results) -> list[BenchCell]:
    """Cells with figures, in the order in which they are timed."""
    return in_order([cell for cell in cells if "metrics" in (results.load(cell) or {})])


def to_time(cells: Sequence[BenchCell], results: Results, *, device: str, force: bool = False) -> list[BenchCell]:
    """Finished cells that have no clean times on such a device yet."""
    here = place_of({"machine": describe_machine(), "device": device})
    return [
        cell
        for cell in finished(cells, results)
        if force or not (is_clean(timing := results.load_timing(cell)) and timing and place_of(timing) == here)
    ]


def place_of(result: Mapping[str, Any]) -> str:
    """The machine in words: only times from one machine are compared."""
    machine, on_gpu = result["machine"], str(result["device"]).startswith("cuda")
    where = machine["accelerator"] if on_gpu else f"{machine['processor']}, {machine['threads']} threads"
    return f"{where}, torch {machine['torch']}"


def time_cells(
    cells: Sequence[BenchCell],
    results: Results,
    *,
    device: str = "cpu",
    repeats: int = REPEATS,
    progress: Progress,
    budget_s: float | None = None,
    note: str | None = None,
) -> Iterator[TimedEvent]:
    """Time finished cells, one event for each; times are written beside the results, which stay as they are.

    Raises BudgetSpentError shortly before the budget is over, and before runs that would not end within it.
    """
    until = None if budget_s is None else time.perf_counter() + budget_s
    watched = within(budget_s, progress)
    origin, done = origin_of(device, note), 0
    for setup, members in setups(cells, device, watched):
        for cell in members:
            watched("", 1, 1)  # a moment to stop at
            timing: dict[str, Any] = {}
            error = ""
            try:
                taken = _take(cell, setup, results.load(cell) or {}, repeats, until)
                timing = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **origin, **taken}
            except (StorageError, BudgetSpentError):
                raise
            except Exception as caught:  # the other cells go on
                error = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
            if timing and (is_clean(timing) or not is_clean(results.load_timing(cell))):  # a clean time stays
                results.save_timing(cell, timing)
            done += 1
            yield TimedEvent(cell, timing, error, done, len(cells))


def _take(
    cell: BenchCell, setup: SharedSetup, result: Mapping[str, Any], repeats: int, until: float | None
) -> dict[str, Any]:
    task = setup.task  # trained now, or before: no part of what is timed
    started = time.perf_counter()
    warm_up, model = _answer(cell, task)  # with its progress, and so with a way to stop
    took = time.perf_counter() - started
    if until is not None and time.perf_counter() + repeats * took > until:
        raise BudgetSpentError
    quiet = replace(task, progress=lambda what, done, total: None)
    check = AloneCheck(setup.device)
    runs = []
    for _ in range(repeats):
        del model
        gc.collect()  # not while it is timed
        cost, model = _answer(cell, quiet)
        runs.append(_figures(cost, effect_moment(result)))
    overhead = serving_overhead(task.model, model, setup.dataset.test_x)
    median = {key: _median([run[key] for run in runs]) for key in ("time", "time_to_effect", "ahead_time")}
    return {
        **check.finish(idle=True).to_json(),
        "warm_up_s": warm_up.total_time_s,
        "runs": runs,
        "median": {**median, "overhead": overhead},
    }


def _answer(cell: BenchCell, task: Task) -> tuple[Cost, nn.Module]:
    """One answer; probes only record the moment, and clients send ahead again."""
    unlearned = cell.method.settings.unlearn(replace(task, probe=lambda model: {}, _collected={}))
    return unlearned.cost, unlearned.model


def effect_moment(result: Mapping[str, Any]) -> int | None:
    """The moment of the result's path at which the effect was reached: -1 for the end, None for never."""
    effect = result["metrics"].get("time_to_effect")
    moments = [moment["time_s"] for moment in result.get("cost", {}).get("path", [])]
    if effect is None:
        return None
    return moments.index(effect) if effect in moments else -1


def _figures(cost: Cost, moment: int | None) -> dict[str, Any]:
    moments = [*(one["time_s"] for one in cost.path), cost.total_time_s]
    return {
        "time": cost.total_time_s,
        "time_by_stage": dict(cost.time_s),
        "time_to_effect": moments[moment] if moment is not None and moment < len(moments) else None,
        "ahead_time": cost.ahead_time_s,
    }


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
