"""A table or figure of the paper: the experiments that make it, what it shows, and what the paper claims with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedup.bench.experiment import BenchCell, Experiment, federation_name, load_experiment
from fedup.bench.settings import build, checked
from fedup.bench.summary import paper_numbers
from fedup.errors import MissingDataError, SettingError

_BY_SCENARIO = ("tab:results", "tab:Unlearning Cost", "tab:privacy budget", "dp")  # figures that stand by scenario
Kind = Literal["table", "before_after", "times", "steps"]


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and the bounds that hold where it is true."""

    text: str
    holds: tuple[str, ...]  # as "fedup_paper.r_a >= retrain.r_a - 0.02"
    scenarios: tuple[str, ...] = ()  # all of the experiment where none is named
    federations: tuple[str, ...] = ()
    ours: bool = False  # of our own method: no claim of the paper


@dataclass(frozen=True)
class _Paper:
    """The table `[paper]` of an experiment."""

    order: int
    number: str  # as the paper counts it
    label: str  # in the paper's source
    shows: tuple[str, ...]  # keys of metrics
    columns: dict  # type: ignore[type-arg]  # titles by method, in order
    claims: list  # type: ignore[type-arg]
    table: str = ""  # the name of a table that several experiments make
    part: str = ""  # which of them
    note: str = ""
    figure: Kind = "table"
    timed: bool = False  # needs clean times
    one_seed: tuple[str, ...] = ()  # federations for which the first seed is enough
    printed: dict = field(default_factory=dict)  # type: ignore[type-arg]  # the paper's name of a method
    printed_as: dict = field(default_factory=dict)  # type: ignore[type-arg]  # the paper's name of a metric


@dataclass(frozen=True)
class Part:
    """One experiment of a table."""

    name: str  # empty where there is one alone
    experiment: Experiment

    def places(self) -> Iterator[tuple[str, str]]:
        """Federations and scenarios, in order."""
        for recipe in self.experiment.recipes:
            federation = federation_name(recipe)
            for scenario in self.experiment.scenarios[federation]:
                yield federation, scenario.name


@dataclass(frozen=True, eq=False)
class PaperTable:
    """A table or figure of the paper."""

    name: str
    title: str
    about: _Paper
    claims: tuple[Claim, ...]
    parts: tuple[Part, ...]

    def cells(self, seeds: Sequence[int] | None = None) -> Iterator[tuple[Part, BenchCell]]:
        """All cells it needs; with `seeds`, these for every federation."""
        for part in self.parts:
            for cell in part.experiment.cells(seeds):
                group = cell.group
                if seeds is not None or group.recipe.seed in self.seeds_of(part, group.federation):
                    yield part, cell

    def seeds_of(self, part: Part, federation: str) -> tuple[int, ...]:
        """The seeds that a federation needs."""
        seeds = part.experiment.seeds
        return seeds[:1] if federation in self.about.one_seed else seeds

    def printed(self, federation: str, scenario: str, method: str, key: str) -> float | None:
        """The figure that the paper prints there."""
        name, metric = self.about.printed.get(method, method), self.about.printed_as.get(key, key)
        of_label = paper_numbers().get(self.about.label, {}).get(federation, {})
        of_scenario = paper_numbers().get(federation, {}).get(scenario, {}) if self.about.label in _BY_SCENARIO else {}
        found: dict[str, float] = of_label.get(name) or of_scenario.get(name) or {}
        return found.get(metric)


def load_tables(folder: Path) -> list[PaperTable]:
    """The tables whose experiments lie in a folder, in the paper's order."""
    parts: dict[str, list[tuple[_Paper, Part]]] = {}
    for path in sorted(folder.glob("*.toml")):
        experiment = load_experiment(path)
        about = build(_Paper, experiment.paper, f"{path}: paper")
        parts.setdefault(about.table or path.stem, []).append((about, Part(about.part, experiment)))
    if not parts:
        raise MissingDataError(f"There is no experiment in {folder}: run this in the repository, or name its folder.")
    tables = [_table(name, found) for name, found in parts.items()]
    return sorted(tables, key=lambda table: table.about.order)


def _table(name: str, found: Sequence[tuple[_Paper, Part]]) -> PaperTable:
    about, first = found[0]
    for part in (part for _, part in found):
        known = [method.name for method in part.experiment.methods]
        checked(about.columns, known, f"{name}: paper.columns")
    claims = tuple(build(Claim, claim, f"{name}: paper.claims[{i}]") for i, claim in enumerate(about.claims))
    if any(other.claims != about.claims or other.shows != about.shows for other, _ in found):
        raise SettingError(f"{name}: the experiments of one table must show and claim the same.")
    return PaperTable(name, first.experiment.title, about, claims, tuple(part for _, part in found))
