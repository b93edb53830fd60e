"""Experiments: a TOML file that says which federations, scenarios and methods meet, and with which seeds."""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedup.bench.goals import Goal, read_goals
from fedup.bench.methods import method_class, needs_history
from fedup.bench.scenarios import scenario_class
from fedup.bench.settings import build, checked, closest, config_of, convert
from fedup.bench.shadow_federations import check_count
from fedup.bench.tuned import load_recipe, load_tuned
from fedup.errors import FedUPError, MissingDataError, SettingError
from fedup.registry import names
from fedup.tasks.datasets._own import own_data
from fedup.tasks.recipe import Recipe

REFERENCE = "retrain"  # every method is compared with it
_NAME = re.compile(r"\w[\w.-]{0,59}")


@dataclass(frozen=True)
class Named:
    """A scenario or a method with its settings, under the name that the experiment gives it."""

    name: str
    use: str  # the file it is in
    settings: Any

    def config(self) -> dict[str, Any]:
        """Plain data that says what it is, whatever its name."""
        own = _own_code(use=self.use) if self.use.endswith(".py") else {}
        return {"use": self.use, **_plain(config_of(self.settings)), **own}


@dataclass(frozen=True)
class Group:
    """What methods share: a federation, a scenario, a seed."""

    recipe: Recipe
    scenario: Named
    recorded: bool = False  # whether some method of the experiment needs the history of the training
    shadow: bool = False  # whether membership inference with a shadow model is measured, too
    shadow_federations: int = 0  # that calibrate the membership attack on single rows; without any it is left out

    @property
    def federation(self) -> str:
        """A name for people and folders."""
        return federation_name(self.recipe)

    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        model = self.recipe.model if self.recipe.model.endswith(".py") else ""
        own = _own_code(data=self.recipe.data, model=model, weights=self.recipe.weights or "")
        return {"federation": {**_plain(self.recipe.settings()), **own}, "scenario": self.scenario.config()}


@dataclass(frozen=True)
class BenchCell:
    """One method in one group: one result."""

    group: Group
    method: Named

    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return {**self.group.config(), "method": self.method.config()}

    @cached_property
    def hash(self) -> str:
        """sha256 of the resolved configuration."""
        return hash_of(self.config())

    def __str__(self) -> str:
        group = self.group
        return f"{group.federation}, {group.scenario.name}, {self.method.name}, seed {group.recipe.seed}"


@dataclass(frozen=True)
class Experiment:
    """An experiment as its TOML file defines it."""

    name: str
    title: str
    seeds: tuple[int, ...]
    recipes: tuple[Recipe, ...]  # with seed 0
    scenarios: Mapping[str, tuple[Named, ...]]  # by federation
    methods: tuple[Named, ...]
    goals: tuple[Goal, ...] = ()
    tuned: Mapping[tuple[str, str, str], Named] = field(default_factory=dict)  # by federation, scenario and method
    tuned_folder: Path | None = None  # where `fedup bench tune` keeps what it chooses
    shadow: bool = False  # whether a shadow model is trained, for the authors' membership inference
    shadow_federations: int = 0  # how many are trained, for the membership attack on single rows
    waiting: Mapping[str, str] = field(default_factory=dict)  # federations whose recipe is not chosen yet, and its file
    paper: Mapping[str, Any] = field(default_factory=dict)  # which table of the paper it makes (`bench/reproduction`)

    def groups(self, seeds: Sequence[int] | None = None) -> Iterator[Group]:
        """Federation by federation, seed by seed."""
        recorded = any(needs_history(method.settings) for method in self.methods)  # whichever of them are asked for
        for recipe in self.recipes:
            for seed in self.seeds if seeds is None else seeds:
                for scenario in self.scenarios[federation_name(recipe)]:
                    yield Group(replace(recipe, seed=seed), scenario, recorded, self.shadow, self.shadow_federations)

    def cells(self, seeds: Sequence[int] | None = None, only: Sequence[str] = ()) -> list[BenchCell]:
        """All cells, or those named in `only`: federations, data sets, models, scenarios or methods."""
        cells = [
            BenchCell(group, self.tuned.get((group.federation, group.scenario.name, method.name), method))
            for group in self.groups(seeds)
            for method in self.methods
        ]
        kinds: list[Callable[[BenchCell], set[str]]] = [
            lambda cell: {cell.group.federation, cell.group.recipe.data, cell.group.recipe.model},
            lambda cell: {cell.group.scenario.name},
            lambda cell: {cell.method.name},
        ]
        known = {name for cell in cells for kind in kinds for name in kind(cell)}
        for name in only:
            if name not in known:
                raise SettingError(f"--only: nothing in {self.name} is called {name!r}; {closest(name, sorted(known))}")
        for kind in kinds:  # names of one kind widen the choice, names of different kinds narrow it
            wanted = set(only) & {name for cell in cells for name in kind(cell)}
            cells = [cell for cell in cells if not wanted or kind(cell) & wanted]
        return cells


def federation_name(recipe: Recipe) -> str:
    """Data set and model, for people and folders."""
    place, _, column = recipe.data.partition(":")
    data = f"{Path(place).stem}_{column}" if column else Path(place).stem
    return re.sub(r"[^\w.-]+", "_", f"{data}-{Path(recipe.model).stem}")


def load_experiment(path: Path) -> Experiment:
    """Read a TOML file; errors name file and key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise MissingDataError(f"There is no experiment {path}.") from error
    except (ValueError, OSError) as error:  # a number of thousands of digits is one, too
        raise SettingError(f"{path} is no readable TOML file: {error}") from error
    if not _NAME.fullmatch(path.stem) or path.stem == "speed" or path.stem.startswith("core-"):
        raise SettingError(
            f"{path}: the file's name names results and tables; speed and core-… are taken, and it is made of letters, "
            "digits, _, - and dots, 60 at most."
        )
    try:
        waiting = _take_recipes(table, path.parent)
        return replace(_with_tuned(_read(path.stem, table), table, path.parent), waiting=waiting)
    except FedUPError as error:
        raise SettingError(f"{path}: {error}") from error


def _read(name: str, table: dict[str, Any]) -> Experiment:
    top = ("title", "seeds", "federations", "scenarios", "methods", "goals", "tuned", "tuned_like", "shadow", "paper")
    checked(table, (*top, "shadow_federations"), "top level")
    federations = convert(table.get("federations", []), list, "federations")
    if not federations:
        raise SettingError("federations: there is none; add [[federations]] with at least data = …")
    recipes, scenarios = [], {}
    for number, federation in enumerate(federations):
        where = f"federations[{number}]"
        settings = dict(convert(federation, dict, where))
        known = convert(table.get("scenarios", {}), dict, "scenarios")
        own = checked(settings.pop("scenarios", {}), list(known), f"{where}.scenarios")
        left_out = convert(settings.pop("leave_out", []), tuple[str, ...], f"{where}.leave_out")
        checked(dict.fromkeys(left_out), list(known), f"{where}.leave_out")
        recipe = _recipe(settings, where)
        name_here = federation_name(recipe)
        if name_here in scenarios:
            raise SettingError(f"{where}: {name_here} is there already; an experiment has each pair once.")
        recipes.append(recipe)
        wanted = _named(table, "scenarios", scenario_class, own)
        scenarios[name_here] = tuple(scenario for scenario in wanted if scenario.name not in left_out)
    methods = _named(table, "methods", method_class)
    if any((method.name == REFERENCE) != (method.use == REFERENCE) for method in methods):
        raise SettingError(f"methods: {REFERENCE} is what the others are compared with, and keeps that name.")
    if REFERENCE not in [method.name for method in methods]:  # gaps need it
        methods = (Named(REFERENCE, REFERENCE, method_class(REFERENCE)()), *methods)
    methods = tuple(sorted(methods, key=lambda method: method.name != REFERENCE))  # it comes first
    seeds = convert(table.get("seeds", [0]), tuple[int, ...], "seeds")
    if not seeds or len(set(seeds)) != len(seeds):
        raise SettingError(f"seeds must be at least one, each once; found {list(seeds)}.")
    title = convert(table.get("title", name), str, "title")
    known = {federation: [scenario.name for scenario in named] for federation, named in scenarios.items()}
    goals = read_goals(table.get("goals", {}), known, [method.name for method in methods])
    shadow, paper = convert(table.get("shadow", False), bool, "shadow"), convert(table.get("paper", {}), dict, "paper")
    made = Experiment(name, title, seeds, tuple(recipes), scenarios, methods, goals, shadow=shadow, paper=paper)
    count = convert(table.get("shadow_federations", 0), int, "shadow_federations")
    return replace(made, shadow_federations=check_count(count) if count else 0)


def _take_recipes(table: dict[str, Any], folder: Path) -> dict[str, str]:
    """Put the chosen settings of recipes into the federations that name a file of them; those without one wait."""
    waiting = {}
    for federation in convert(table.get("federations", []), list, "federations"):
        if isinstance(federation, dict) and "recipe" in federation:
            file = folder / convert(federation.pop("recipe"), str, "federations.recipe")
            chosen = load_recipe(file)
            federation |= chosen or {}
            if chosen is None:
                own = {key: value for key, value in federation.items() if key not in ("scenarios", "leave_out")}
                waiting[federation_name(_recipe(own, "federations"))] = str(file)
    return waiting


def _with_tuned(experiment: Experiment, table: dict[str, Any], folder: Path) -> Experiment:
    """The experiment with tuned settings; settings given in its own file win."""
    if "tuned" not in table:
        return experiment
    place = folder / convert(table["tuned"], str, "tuned")
    like = checked(table.get("tuned_like", {}), list(experiment.scenarios), "tuned_like")  # whose settings they take
    chosen: dict[tuple[str, str, str], Named] = {}
    for method in experiment.methods:
        own = {name: value for name, value in table["methods"].get(method.name, {}).items() if name != "use"}
        for choice in load_tuned(place / f"{Path(method.use).stem}.toml"):
            settings = build(type(method.settings), {**choice.settings, **own}, f"{place}, {method.use}")
            takers = [taker for taker, giver in like.items() if giver == choice.federation]
            for federation in (choice.federation, *takers):
                key = federation, choice.scenario, method.name
                if federation == choice.federation or key not in chosen:
                    chosen[key] = replace(method, settings=settings)
    return replace(experiment, tuned=chosen, tuned_folder=place)


def _recipe(settings: dict[str, Any], where: str) -> Recipe:
    if "data" not in settings:
        raise SettingError(f"{where}: data is missing.")
    preset = convert(settings.pop("preset", "default"), str, f"{where}.preset")
    typed = build(Recipe, {"model": "lenet5", "rounds": 1, **settings}, where, also={"seed": 0})  # types and names
    given = {name: getattr(typed, name) for name in settings}
    return Recipe.suited_to(preset=preset, **given)


def _named(
    table: dict[str, Any], kind: str, find: Callable[[str], type[Any]], own: Mapping[str, Any] | None = None
) -> tuple[Named, ...]:
    """The scenarios or methods of an experiment: `[methods.NAME]` with settings, and `use` where NAME is no file's."""
    parts = []
    for name, settings in convert(table.get(kind, {}), dict, kind).items():
        where = f"{kind}.{name}"
        if not _NAME.fullmatch(name):
            raise SettingError(f"{where}: a name has letters, digits, _, - and dots, 60 at most: it names files.")
        given = {**convert(settings, dict, where), **convert((own or {}).get(name, {}), dict, where)}
        use = convert(given.pop("use", name), str, f"{where}.use")
        if use != name and name in names(f"fedup.bench.{kind}"):
            raise SettingError(f"{where}: {name} is the name of another one than {use!r}; choose a name of your own.")
        parts.append(Named(name, use, build(find(use), given, where)))
    if not parts:
        raise SettingError(f"{kind}: there is none; add [{kind}.NAME] for each.")
    return tuple(parts)


def _own_code(**sources: str) -> dict[str, Any]:
    """sha256 of the user's own files: their content is part of the configuration."""
    files = {name: [(path, path.stat()) for path in _own_files(source)] for name, source in sources.items()}
    own = {
        name: [_sha256(path, stat.st_size, stat.st_mtime_ns) for path, stat in paths]
        for name, paths in files.items()
        if paths
    }
    return {"own_files": own} if own else {}


def _own_files(source: str) -> list[Path]:
    """The user's own files behind a name in an experiment."""
    if Path(source).suffix in (".py", ".safetensors"):
        return [Path(source)] if Path(source).is_file() else []
    if not source or source in names("fedup.tasks.datasets"):
        return []
    own = own_data(source)
    return own.files if own else []


@cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of(config: Mapping[str, Any]) -> str:
    """sha256 of plain data."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON gives them back."""
    return json.loads(json.dumps(value))
