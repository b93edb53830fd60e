"""One recipe for a federation, chosen from candidates on validation rows, with a seed that no table uses."""

import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedup.bench.runner import within
from fedup.bench.settings import build, checked, convert
from fedup.bench.training_cache import trained
from fedup.bench.tuned import recipe_trials, save_recipe
from fedup.bench.tuning import TUNING_SEED
from fedup.errors import DataError, FedUPError, MissingDataError, SettingError
from fedup.tasks.evaluation import predict
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe


@dataclass(frozen=True)
class Candidates:
    """What is tried: the recipe that all share, and by name the settings that differ."""

    file: Path  # where choice and evidence go
    recipe: Recipe
    settings: Mapping[str, Mapping[str, Any]]
    seed: int

    def of(self, name: str) -> Recipe:
        """A candidate's recipe."""
        return replace(self.recipe, **self.settings[name], seed=self.seed)


def load_candidates(path: Path) -> Candidates:
    """Read `into`, `seed`, `[federation]` and `[candidates.NAME]` from a TOML file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        checked(table, ("title", "into", "seed", "federation", "candidates"), "top level")
        base = Recipe.suited_to(**convert(table.get("federation", {}), dict, "federation"))
        candidates = {
            name: dict(convert(settings, dict, f"candidates.{name}"))
            for name, settings in convert(table.get("candidates", {}), dict, "candidates").items()
        }
        for name, settings in candidates.items():
            build(Recipe, {**_given(base), **settings}, f"candidates.{name}", also={"seed": 0})
        seed = convert(table.get("seed", TUNING_SEED), int, "seed")
        into = path.parent / convert(table.get("into", ""), str, "into")
    except FileNotFoundError as error:
        raise MissingDataError(f"There is no file {path}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, FedUPError) as error:
        raise SettingError(f"{path}: {error}") from error
    if not candidates or into == path.parent or seed < TUNING_SEED:
        raise SettingError(
            f"{path} must have [candidates.NAME], the file `into` for the choice, and a seed of {TUNING_SEED} or more, "
            "which no table uses."
        )
    return Candidates(into, base, candidates, seed)


def _given(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in recipe.settings().items() if name != "seed" and value is not None}


def tune_recipe(
    candidates: Candidates, source: str, *, device: str, progress: Progress, budget_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Train the candidates that are missing, one trial for each; the best of all is written once all are there.

    Raises BudgetSpentError shortly before the budget is over; a training goes on where it stopped.
    """
    tried = {trial["name"]: trial for trial in recipe_trials(candidates.file)}
    watched = within(budget_s, progress)
    for name, settings in candidates.settings.items():
        if tried.get(name, {}).get("settings") != dict(settings):
            tried[name] = {"name": name, "settings": dict(settings), **_try(candidates.of(name), device, watched)}
            ended = [tried[known] for known in candidates.settings if known in tried]
            best = max(ended, key=lambda trial: trial["accuracy"])["settings"]
            is_all = len(ended) == len(candidates.settings)
            save_recipe(candidates.file, {**_given(candidates.recipe), **best} if is_all else {}, ended, source)
            yield tried[name]


def _try(recipe: Recipe, device: str, progress: Progress) -> dict[str, Any]:
    """The accuracy of a candidate on validation rows; 0 where its training diverges."""
    started, dataset = time.perf_counter(), recipe.load()
    federation = recipe.federation(dataset).to(device)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    try:
        model = trained(start, federation, recipe, progress=progress)
    except DataError:
        return {"accuracy": 0.0, "time_s": time.perf_counter() - started, **_origin(recipe, device)}
    rows = federation.rows("validation")
    right = predict(model, federation.x, rows).argmax(1) == federation.y[rows]
    accuracy = float(right.double().mean())
    return {"accuracy": accuracy, "time_s": time.perf_counter() - started, **_origin(recipe, device)}


def _origin(recipe: Recipe, device: str) -> dict[str, Any]:
    machine = describe_machine()
    where = str(machine["accelerator"] if device.startswith("cuda") else machine["processor"])
    return {"seed": recipe.seed, "machine": where, "commit": str(describe_code().get("commit") or "unknown")}
