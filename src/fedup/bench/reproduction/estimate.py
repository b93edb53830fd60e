"""How long missing cells may take, from the seconds of stored ones: like cells first, else a guess that says so."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedup.bench.experiment import REFERENCE, BenchCell, Group
from fedup.bench.timing import is_clean

_ROWS_OF_ALL = 50_000  # of a data set whose size no result tells: an order of magnitude
_SHADOW = 0.3  # of a training: the shadow model has the held-out fifth of the rows, and fewer of its steps overlap
_ANY = "*"


@dataclass(frozen=True)
class Estimate:
    """Seconds on a GPU of its own, and whether no cell of that pair was ever measured."""

    seconds: float
    is_guess: bool

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.seconds + other.seconds, self.is_guess or other.is_guess)


def total(estimates: Iterable[Estimate]) -> Estimate:
    """The sum; a guess if one of them is."""
    return sum(estimates, Estimate(0.0, False))


class Estimator:
    """Knows what stored results took.

    Most were measured while several processes shared the GPU. Where a result has clean times, too, the two together
    say how much sharing slowed it down; the median of that factor is applied to all others.
    """

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self._cells: dict[tuple[str, str], list[float]] = {}
        self._training: dict[str, list[float]] = {}  # seconds for a row and a round, by pair
        measured = [one for one in results if "metrics" in one and str(one.get("device", "")).startswith("cuda")]
        self.sharing = _sharing(measured)
        for result in measured:
            federation, use = result["config"]["federation"], str(result["config"]["method"]["use"])
            slowed = self.sharing if result.get("alone") is not True else 1.0
            for pair in (_pair(federation), _ANY):
                self._cells.setdefault((pair, use), []).append(slowed * float(result["wall_s"]))
                if use == REFERENCE and (work := _work(federation)):
                    clean = result["timing"]["median"]["time"] if is_clean(result["timing"]) else None
                    seconds = clean or slowed * sum(result["cost"]["time_s"].values())
                    self._training.setdefault(pair, []).append(seconds / work)

    def cell(self, cell: BenchCell) -> Estimate:
        """A method's answer and its figures."""
        federation, use = cell.group.config()["federation"], cell.method.use
        if use == REFERENCE:
            return self.training(cell.group)
        own = self._cells.get((_pair(federation), use))
        return Estimate(_middle(own or self._cells.get((_ANY, use), [10.0])), own is None)

    def training(self, group: Group) -> Estimate:
        """One training of the federation."""
        federation = group.config()["federation"]
        own = self._training.get(_pair(federation))
        return Estimate(_middle(own or self._training.get(_ANY, [1e-5])) * _work(federation), own is None)

    def group(self, cells: Sequence[BenchCell]) -> Estimate:
        """Cells of one group with what they share: the federation, Retrain as the reference, and the shadow model."""
        group = cells[0].group
        training = self.training(group)
        trainings = 1.0 + (REFERENCE not in [cell.method.use for cell in cells]) + _SHADOW * group.shadow
        shared = Estimate(trainings * training.seconds, training.is_guess)
        return total([shared, *map(self.cell, cells)])


def _sharing(measured: Sequence[Mapping[str, Any]]) -> float:
    """Clean seconds over those beside other processes; 1 where nothing is known."""
    factors = [
        one["timing"]["median"]["time"] / one["metrics"]["time"]
        for one in measured
        if is_clean(one["timing"]) and one["timing"]["median"]["time"] and one["metrics"].get("time")
    ]
    return min(1.0, statistics.median(factors)) if factors else 1.0


def _pair(federation: Mapping[str, Any]) -> str:
    return f"{federation['data']} {federation['model']}"


def _work(federation: Mapping[str, Any]) -> float:
    """Rows times rounds times epochs."""
    return float((federation["rows"] or _ROWS_OF_ALL) * federation["rounds"] * federation["epochs"])


def _middle(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)
