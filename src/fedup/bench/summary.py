"""Results of an experiment, summed up over seeds: mean, spread and number, and what the paper printed."""

import statistics
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fedup.bench.experiment import REFERENCE, BenchCell, Experiment, Named
from fedup.bench.metrics import Column, columns, timed_keys
from fedup.bench.results import Results
from fedup.bench.timing import is_clean, place_of
from fedup.errors import ArtifactError
from fedup.registry import names

ORIGINAL = "none"  # the control that shows the model before any request
FLOOR = "retrain_again"  # a second Retrain: how far two retrainings are apart


@dataclass(frozen=True)
class Figure:
    """One figure over seeds."""

    values: Mapping[int, float]  # by seed

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Sample deviation; None for a single seed."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Row:
    """One method in one block."""

    method: Named
    results: Mapping[int, Mapping[str, Any]]  # by seed
    paper: Mapping[str, float]
    times: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by seed: clean ones, all from one place

    def figure(self, key: str, seeds: Collection[int] | None = None) -> Figure | None:
        """A figure over all seeds that have it, or over these; of times, clean ones only."""
        if key not in timed_keys():
            return _figure(self._measured(key), seeds)
        return _figure({seed: timing["median"].get(key) for seed, timing in self.times.items()}, seeds)

    def values(self, key: str) -> Mapping[int, float]:
        """The values of a figure by seed; empty without a figure."""
        figure = self.figure(key)
        return figure.values if figure else {}

    def uncounted(self, key: str) -> Figure | None:
        """Seconds measured once, beside the accuracies, on a device that may have been shared: shown with a mark where
        clean times are missing, and used in no comparison."""
        if key not in timed_keys() or self.figure(key) is not None:
            return None
        return _figure(self._measured(key))

    @property
    def reached(self) -> int:
        """In how many seeds the effect was reached; this needs no clean time."""
        return sum(value is not None for value in self._measured("time_to_effect").values())

    def never(self, key: str) -> bool:
        """Whether `key` is the time to effect, and no seed reached it."""
        return key == "time_to_effect" and bool(self.seeds) and not self.reached

    def _measured(self, key: str) -> dict[int, Any]:
        return {seed: result.get("metrics", {}).get(key) for seed, result in self.results.items()}

    @property
    def seeds(self) -> list[int]:
        """Seeds with a finished result."""
        return [seed for seed, result in self.results.items() if "metrics" in result]

    @property
    def failures(self) -> dict[int, str]:
        """What went wrong, by seed."""
        failed = {seed: result["failed"] for seed, result in self.results.items() if "failed" in result}
        return {seed: f"{reason['error']}: {reason['message']}" for seed, reason in failed.items()}

    @property
    def supported(self) -> bool:
        """False where the method cannot answer such requests at all."""
        return not all(result.get("not_supported") for result in self.results.values())


@dataclass(frozen=True)
class Block:
    """One federation in one scenario: all methods."""

    federation: str
    scenario: Named
    rows: Sequence[Row]
    config: Mapping[str, Any]  # of the federation
    stories: Mapping[int, str]  # by seed
    timed_on: str = ""  # where its clean times were taken

    def row(self, name: str) -> Row | None:
        """The row of the method of that name."""
        return next((row for row in self.rows if row.method.name == name), None)

    @property
    def floor(self) -> Row | None:
        """The second Retrain, if it was measured."""
        return next((row for row in self.rows if row.method.use == FLOOR and row.seeds), None)

    @property
    def failed_attacks(self) -> list[int]:
        """Seeds in which the attack failed, so that there was nothing to forget."""
        original = next((row for row in self.rows if row.method.use == ORIGINAL), None)
        retrained = self.row(REFERENCE)
        if original is None or retrained is None:
            return []
        both = [seed for seed in original.seeds if seed in retrained.seeds]
        took = self.scenario.settings.took
        return [s for s in both if not took(original.results[s]["metrics"], retrained.results[s]["metrics"])]

    def shown(self, table: str) -> list[Column]:
        """The columns of a table in which some method has a figure."""
        own = [column for column in columns() if column.table == table]
        return [col for col in own if any(row.figure(col.key) or row.uncounted(col.key) for row in self.rows)]

    @property
    def commits(self) -> list[str]:
        """The code that the results come from."""
        codes = [result.get("code", {}) for row in self.rows for result in row.results.values()]
        commits = ((str(code.get("commit") or "unknown")[:10], code.get("changed")) for code in codes)
        return sorted({f"{commit} with local changes" if changed else commit for commit, changed in commits})

    @property
    def machines(self) -> list[str]:
        """The machines that the results come from."""
        results = [result for row in self.rows for result in row.results.values()]
        return sorted({place_of(one) + (f" ({one['note']})" if one.get("note") else "") for one in results})


def summarize(experiment: Experiment, results: Results, seeds: Sequence[int] | None = None) -> list[Block]:
    """A block for each federation and scenario that has a result, with whatever seeds, or with these."""
    by_place: dict[tuple[str, str], list[_Measured]] = {}
    for cell in experiment.cells(results.seeds() if seeds is None else seeds):
        result = results.load(cell)
        if result is not None:
            parts = [result.get("machine"), *(result.get(name, {}) for name in ("metrics", "failed", "code"))]
            if not all(isinstance(part, dict) for part in parts) or "device" not in result:
                path = results.path(cell)
                raise ArtifactError(f"{path} lacks a part of a result: remove it, and its cell is measured again.")
            place = cell.group.federation, cell.group.scenario.name
            by_place.setdefault(place, []).append(_Measured(cell, result, _clean(results, cell)))
    return [_block(measured) for measured in by_place.values()]


class _Measured(NamedTuple):
    """A cell with its result and its times."""

    cell: BenchCell
    result: Mapping[str, Any]
    timing: Mapping[str, Any] | None  # clean

    @property
    def seed(self) -> int:
        return self.cell.group.recipe.seed


def _clean(results: Results, cell: BenchCell) -> Mapping[str, Any] | None:
    timing = results.load_timing(cell)
    if timing is None or not is_clean(timing):
        return None
    if not isinstance(timing.get("median"), dict) or not isinstance(timing.get("machine"), dict):
        raise ArtifactError(f"{results.timing_path(cell)} lacks a part: remove it, and its cell is timed again.")
    return timing


def _block(measured: Sequence[_Measured]) -> Block:
    places = Counter(place_of(one.timing) for one in measured if one.timing)
    timed_on = max(sorted(places), key=places.__getitem__, default="")  # times of two machines make no ratio
    by_method: dict[str, list[_Measured]] = {}
    for one in measured:
        by_method.setdefault(one.cell.method.name, []).append(one)
    rows = []
    for own in by_method.values():
        cell = own[-1].cell
        times = {one.seed: one.timing for one in own if one.timing and place_of(one.timing) == timed_on}
        rows.append(Row(cell.method, {one.seed: one.result for one in own}, printed(cell), times))
    group = measured[0].cell.group
    stories = {one.seed: one.result["story"] for one in measured if one.result.get("story")}
    return Block(group.federation, group.scenario, rows, group.config()["federation"], stories, timed_on)


def _figure(found: Mapping[int, Any], seeds: Collection[int] | None = None) -> Figure | None:
    values = {s: float(value) for s, value in found.items() if value is not None and (seeds is None or s in seeds)}
    return Figure(values) if values else None


def printed(cell: BenchCell) -> dict[str, float]:
    """What the paper printed for such a cell; nothing where it has none, or where a part is the user's own."""
    recipe, method = cell.group.recipe, cell.method
    known, noise = names("fedup.tasks.datasets") + names("fedup.tasks.models"), getattr(method.settings, "sigma", None)
    # the paper's figures are about a method as it is, or FedUP with a named noise
    of_paper = method.name in (method.use, f"paper-{noise:g}" if noise else None)
    if recipe.data not in known or recipe.model not in known or not of_paper:
        return {}
    of_federation = paper_numbers().get(cell.group.federation, {})
    return dict(of_federation.get(cell.group.scenario.use, {}).get(method.name, {}))


@cache
def paper_numbers() -> dict[str, Any]:
    """All figures that the paper prints."""
    return tomllib.loads(files("fedup.bench").joinpath("paper.toml").read_text(encoding="utf-8"))
