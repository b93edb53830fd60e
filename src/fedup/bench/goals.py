"""Goals of an experiment, written beside it and judged from its results: met, or missed and by how much."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedup.bench.metrics import columns, timed_keys
from fedup.bench.settings import checked, closest, convert
from fedup.errors import SettingError

if TYPE_CHECKING:
    from fedup.bench.summary import Block  # which knows experiments, which know their goals

_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
_GOAL = re.compile(
    rf"(?P<sign><=|>=)\s*(?:(?P<method>[A-Za-z][\w.-]*)\.(?P<metric>\w+)"
    rf"(?:\s*\*\s*(?P<factor>{_NUMBER}))?(?:\s*(?P<margin>[+-]\s*{_NUMBER}))?"
    rf"|(?P<fixed>-?{_NUMBER}))"
)
_OURS = "fedup"
_ROUNDING = 1e-9
GOALS_ABOUT = "Means over the seeds; the bound is the goal's right side with this experiment's own figures in it."
GOALS_HEAD = ["federation", "scenario", "goal", "found", "bound", "", "n"]


@dataclass(frozen=True)
class Goal:
    """A method's figure that must be at least, or at most, another figure times a factor plus a margin."""

    federation: str
    scenario: str
    method: str
    metric: str
    at_least: bool
    other: tuple[str, str] | None  # method and metric; None for a fixed bound
    margin: float
    text: str  # as it was written
    factor: float = 1.0  # of the other figure


@dataclass(frozen=True)
class Judged:
    """A goal and its figures: means over the seeds that have both."""

    goal: Goal
    found: float
    bound: float
    seeds: int

    @property
    def missed_by(self) -> float:
        """0 where the goal is met."""
        beyond = self.bound - self.found if self.goal.at_least else self.found - self.bound
        return beyond if beyond > _ROUNDING else 0.0

    @property
    def verdict(self) -> str:
        """In words."""
        return f"missed by {self.missed_by:.3f}" if self.missed_by > 0 else "met"


def read_goals(table: object, federations: Mapping[str, Sequence[str]], methods: Sequence[str]) -> tuple[Goal, ...]:
    """The goals in `[goals.FEDERATION.SCENARIO]`: lines such as `asr = "<= retrain.asr + 0.02"`; on the left stands a
    metric of FedUP, or `method.metric`."""
    goals = []
    for federation, scenarios in checked(table, list(federations), "goals").items():
        where = f"goals.{federation}"
        for scenario, lines in checked(scenarios, federations[federation], where).items():
            for figure, text in convert(lines, dict, f"{where}.{scenario}").items():
                goals.append(read_goal(federation, scenario, figure, text, methods, f"{where}.{scenario}.{figure}"))
    return tuple(goals)


def read_goal(federation: str, scenario: str, figure: str, text: Any, methods: Sequence[str], where: str) -> Goal:
    """One goal: a figure and the bound that it has to keep."""
    parsed = _GOAL.fullmatch(convert(text, str, where).strip())
    if parsed is None:
        raise SettingError(f'{where} must read like "<= retrain.asr + 0.02" or ">= 0.9"; found {text!r}.')
    method, _, metric = figure.rpartition(".")
    other = (parsed["method"], parsed["metric"]) if parsed["metric"] else None
    known = {"method": list(methods), "metric": [column.key for column in columns()]}
    for names in ((method or _OURS, metric), other or ()):
        for name, kind in zip(names, known, strict=False):
            if name not in known[kind]:
                raise SettingError(f"{where}: there is no {kind} {name!r}; {closest(name, known[kind])}")
    margin = float((parsed["margin"] or parsed["fixed"] or "0").replace(" ", ""))
    return Goal(
        federation,
        scenario,
        method or _OURS,
        metric,
        parsed["sign"] == ">=",
        other,
        margin,
        text,
        float(parsed["factor"] or 1),
    )


def judge_goals(goals: Sequence[Goal], blocks: "Sequence[Block]") -> Iterator[Judged]:
    """The goals that have results, in their order in the file."""
    by_name = {(block.federation, block.scenario.name): block for block in blocks}
    for goal in goals:
        block = by_name.get((goal.federation, goal.scenario))
        row, other = (block.row(name) if block else None for name in (goal.method, goal.other[0] if goal.other else ""))
        values = row.values(goal.metric) if row else {}
        others = dict.fromkeys(values, 0.0) if not goal.other else other.values(goal.other[1]) if other else {}
        seeds = sorted(values.keys() & others.keys())
        if seeds:
            found = statistics.fmean(values[seed] for seed in seeds)
            bound = goal.factor * statistics.fmean(others[seed] for seed in seeds) + goal.margin
            yield Judged(goal, found, bound, len(seeds))


def goal_rows(goals: Sequence[Goal], blocks: "Sequence[Block]") -> list[list[str]]:
    """Goals as rows of a table: met, or missed by how much; goals for times need clean times, others a figure."""
    judged = list(judge_goals(goals, blocks))
    there = {(block.federation, block.scenario.name): block for block in blocks}
    lines = [(one.goal, f"{one.found:.3f}", f"{one.bound:.3f}", one.verdict, str(one.seeds)) for one in judged]
    for goal in goals:
        block = there.get((goal.federation, goal.scenario))
        if block is None or goal in [one.goal for one in judged]:
            continue
        row = block.row(goal.method)
        if timed_keys() & {goal.metric, goal.other[1] if goal.other else ""}:
            lines.append((goal, "–", "–", "not judged: no clean time", "0"))
        elif row and row.seeds and row.figure(goal.metric) is None:  # where the gap is small nothing is claimed
            lines.append((goal, "–", "–", "not judged: no figure in any seed", "0"))
    return [[goal.federation, goal.scenario, f"{goal.method}.{goal.metric} {goal.text}", *row] for goal, *row in lines]
