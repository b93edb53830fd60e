"""Tuned settings and their evidence, as a TOML file."""

import fcntl
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedup.errors import ArtifactError
from fedup.files import explained, write_text

BUDGET = 4  # combinations that each method may try in each place


@dataclass(frozen=True)
class Trial:
    """One combination of settings, scored on validation rows of the tuning seed's federation."""

    settings: Mapping[str, Any]
    score: float
    r_a: float
    f_a: float
    time_s: float
    failed: str = ""  # why there is no answer at all


@dataclass(frozen=True)
class Tuned:
    """The choice for one place (a federation and a scenario), and its evidence."""

    federation: str
    scenario: str
    settings: Mapping[str, Any]
    retrain: Mapping[str, float]  # its accuracies on the same rows
    tried: Sequence[Trial]
    about: Mapping[str, Any]  # seed, device, machine, code, date


def save_tuned(path: Path, use: str, experiment: str, choices: Sequence[Tuned]) -> None:
    """Write choices and evidence as TOML; those of other places stay."""
    with _alone_in(path.parent):
        places = {(choice.federation, choice.scenario): choice for choice in [*load_tuned(path), *choices]}
        lines = [
            f"# Chosen by `fedup bench tune {use} benchmarks/experiments/{experiment}.toml`; do not edit.",
            "# score = (1 + R-A - Retrain's) * (1 - |F-A - Retrain's|), on validation rows; of samples, F-A is that",
            "# of the rows to be forgotten.",
            f"method = {_toml(use)}",
            f"budget = {BUDGET}",
        ]
        for _, choice in sorted(places.items()):
            lines += ["", "[[places]]", *(f"{name} = {_toml(value)}" for name, value in asdict(choice).items())]
        write_text(path, "\n".join(lines) + "\n")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A lock: processes that tune other places wait, and then add to the file."""
    with explained(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load_tuned(path: Path) -> list[Tuned]:
    """The choices so far; empty without such a file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        places = [dict(place) for place in table.get("places", [])]
        return [Tuned(**{**place, "tried": [Trial(**trial) for trial in place.get("tried", [])]}) for place in places]
    except FileNotFoundError:
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} was not made by `fedup bench tune` ({error}): remove it and tune again."
        ) from error


def save_recipe(path: Path, chosen: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], source: str) -> None:
    """Write the settings of a federation that were chosen, and the evidence."""
    lines = [
        f"# Chosen by `fedup bench tune recipe {source}`; do not edit.",
        "# Each candidate was trained once without any request; the accuracy is that on validation rows.",
        f"recipe = {_toml(chosen)}",
    ]
    for trial in tried:
        lines += ["", "[[tried]]", *(f"{name} = {_toml(value)}" for name, value in trial.items())]
    write_text(path, "\n".join(lines) + "\n")


def load_recipe(path: Path) -> dict[str, Any] | None:
    """The settings chosen so far; None before there is such a file, or while it holds only trials."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return dict(table["recipe"]) or None
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:  # what is no TOML or no UTF-8 is a ValueError, too
        raise ArtifactError(
            f"{path} was not made by `fedup bench tune recipe` ({error}): remove it and tune again."
        ) from error


def recipe_trials(path: Path) -> list[dict[str, Any]]:
    """The candidates that were tried so far."""
    load_recipe(path)  # says what is wrong with it
    return list(tomllib.loads(path.read_text(encoding="utf-8")).get("tried", [])) if path.exists() else []


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ",".join(f"\n  {_toml(one)}" for one in value) + "\n]"
    if isinstance(value, float):
        return repr(round(value, 6))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # else texts, numbers and truth are alike
