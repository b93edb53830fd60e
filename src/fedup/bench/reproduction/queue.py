"""Which cells of the paper's tables are missing, which wait for something, and in which order they run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedup.bench.experiment import REFERENCE, BenchCell, Experiment
from fedup.bench.recipes import load_candidates
from fedup.bench.reproduction.estimate import Estimate, Estimator, total
from fedup.bench.reproduction.pool import Pool
from fedup.bench.reproduction.tables import PaperTable
from fedup.bench.settings import closest
from fedup.bench.tuning import grid_of
from fedup.errors import SettingError


@dataclass(frozen=True)
class Wanted:
    """A cell of a table, and what it waits for: the command that has to run first, empty if none."""

    table: PaperTable
    cell: BenchCell
    waits_for: str
    is_done: bool


@dataclass(frozen=True)
class Queue:
    """What the chosen tables need. A cell of several tables counts in each of them, and runs once."""

    wanted: tuple[Wanted, ...]
    cells: tuple[BenchCell, ...]  # missing and ready, in the order in which they run
    estimate: Estimate  # of these
    later: tuple[BenchCell, ...]  # missing, and waiting
    later_estimate: Estimate

    @property
    def commands(self) -> list[str]:
        """What has to run before the cells that wait."""
        return list(dict.fromkeys(one.waits_for for one in self.wanted if one.waits_for and not one.is_done))

    def of(self, table: PaperTable) -> tuple[int, int, int]:
        """Cells of a table: done, ready to run, waiting."""
        own = [one for one in self.wanted if one.table is table]
        done = sum(one.is_done for one in own)
        waiting = sum(bool(one.waits_for) and not one.is_done for one in own)
        return done, len(own) - done - waiting, waiting


def make_queue(
    tables: Sequence[PaperTable],
    pool: Pool,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    force: bool = False,
    folder: Path = Path("benchmarks/experiments/paper"),
) -> Queue:
    """The cells of all tables, or of those that `only` names; its other names choose federations, data sets, models,
    scenarios and methods, as in `fedup bench run`."""
    chosen, names = _chosen(tables, only)
    commands = _Commands(tables, folder)
    wanted = []
    for table in chosen:
        for part, cell in table.cells(seeds):
            if _is_named(cell, names):
                waits = commands.before(part.experiment, cell)
                wanted.append(Wanted(table, cell, waits, pool.is_done(cell) and not force))
    estimator = Estimator(pool.results())
    ready, later = (
        _in_order([one.cell for one in wanted if not one.is_done and bool(one.waits_for) == waits], estimator)
        for waits in (False, True)
    )
    return Queue(tuple(wanted), *ready, *later)


def _chosen(tables: Sequence[PaperTable], only: Sequence[str]) -> tuple[list[PaperTable], list[set[str]]]:
    """The tables, and the other names by kind: of one kind they widen the choice, of different kinds they narrow it."""
    by_name = {table.name: table for table in tables}
    chosen = [table for table in tables if table.name in only] or list(tables)
    kinds: list[set[str]] = [set(), set(), set()]
    for table in chosen:
        for _, cell in table.cells():
            for kind, own in zip(kinds, _names(cell), strict=True):
                kind |= own
    known = set(by_name).union(*kinds)
    for name in only:
        if name not in known:
            raise SettingError(
                f"--only: nothing in the paper's tables is called {name!r}; {closest(name, sorted(known))}"
            )
    rest = set(only) - set(by_name)
    return chosen, [kind & rest for kind in kinds]


def _names(cell: BenchCell) -> tuple[set[str], set[str], set[str]]:
    recipe = cell.group.recipe
    return {cell.group.federation, recipe.data, recipe.model}, {cell.group.scenario.name}, {cell.method.name}


def _is_named(cell: BenchCell, names: Sequence[set[str]]) -> bool:
    return all(not wanted or own & wanted for own, wanted in zip(_names(cell), names, strict=True))


class _Commands:
    """What has to run before a cell can."""

    def __init__(self, tables: Sequence[PaperTable], folder: Path) -> None:
        self._recipes = {
            load_candidates(path).file.resolve(): f"fedup bench tune recipe {path.as_posix()}"
            for path in sorted((folder / "recipes").glob("*.toml"))
        }
        self._tuning: dict[Path, str] = {}  # by folder of choices: the experiment with most methods makes them all
        experiments = [part.experiment for table in tables for part in table.parts]
        for experiment in sorted(experiments, key=lambda experiment: len(experiment.methods)):
            if experiment.tuned_folder is not None:
                source = (folder / f"{experiment.name}.toml").as_posix()
                self._tuning[experiment.tuned_folder.resolve()] = f"fedup bench tune all {source}"

    def before(self, experiment: Experiment, cell: BenchCell) -> str:
        """The command that has to run before a cell; empty if none."""
        federation, scenario, method = cell.group.federation, cell.group.scenario.name, cell.method
        if federation in experiment.waiting:
            file = Path(experiment.waiting[federation])
            return self._recipes.get(file.resolve(), f"write {file}")
        is_tunable = method.name == method.use and bool(grid_of(method.use))
        place = federation, scenario, method.name
        if experiment.tuned_folder is None or not is_tunable or place in experiment.tuned:
            return ""
        # elsewhere a choice was made for such requests: then the method answers them, and one is missing here
        elsewhere = any(known[1:] == place[1:] for known in experiment.tuned)
        return f"{self._tuning[experiment.tuned_folder.resolve()]} --only {federation}" if elsewhere else ""


def _in_order(missing: Iterable[BenchCell], estimator: Estimator) -> tuple[tuple[BenchCell, ...], Estimate]:
    """Each configuration once, group by group; the first seed of all federations first, in it what takes least."""
    groups: dict[str, dict[str, BenchCell]] = {}
    flags: dict[str, list[bool]] = {}
    for cell in missing:
        key = str(cell.group.config())
        groups.setdefault(key, {}).setdefault(cell.hash, cell)
        has = flags.setdefault(key, [False, False])
        has[0], has[1] = has[0] or cell.group.recorded, has[1] or cell.group.shadow
    merged = []
    for key, cells in groups.items():
        first = next(iter(cells.values())).group
        group = replace(first, recorded=flags[key][0], shadow=flags[key][1])
        own = [replace(cell, group=group) for cell in cells.values()]
        own.sort(key=lambda cell: cell.method.use != REFERENCE)
        merged.append((own, estimator.group(own)))
    merged.sort(key=lambda one: (one[0][0].group.recipe.seed, one[1].seconds))
    return tuple(cell for own, _ in merged for cell in own), total(estimate for _, estimate in merged)
