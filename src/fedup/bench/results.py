"""Results on disk: one JSON file for each cell, named by its configuration, written whole or not at all; its clean
times lie beside it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedup.bench.experiment import BenchCell, hash_of
from fedup.errors import ArtifactError
from fedup.files import write_text

FORMAT = 1


class Results:
    """The results of one experiment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: BenchCell) -> Path:
        """The file of a cell's result; another configuration has another file."""
        group = self.folder / cell.group.federation / cell.group.scenario.name
        return group / f"{cell.method.name}-seed{cell.group.recipe.seed}-{cell.hash[:8]}.json"

    def target(self, cell: BenchCell) -> Path:
        """The file that a new result is written to."""
        return self.path(cell)

    def timing_path(self, cell: BenchCell) -> Path:
        """The file of a cell's clean times, beside its result."""
        return _beside(self.path(cell))

    def load(self, cell: BenchCell) -> dict[str, Any] | None:
        """A cell's result, or None where there is none yet."""
        return _load(self.path(cell), cell, lambda result: hash_of(result.get("config", {})))

    def load_timing(self, cell: BenchCell) -> dict[str, Any] | None:
        """A cell's times from `fedup bench time`, or None where there are none."""
        return _load(self.timing_path(cell), cell, lambda timing: timing.get("hash"))

    def save_timing(self, cell: BenchCell, taken: Mapping[str, Any]) -> None:
        """Write a cell's times beside its result."""
        about = {"format": FORMAT, "hash": cell.hash, "seed": cell.group.recipe.seed}
        write_text(_beside(self.target(cell)), json.dumps({**about, **taken}, indent=1) + "\n")

    def seeds(self) -> list[int]:
        """The seeds that have results."""
        matches = (re.search(r"-seed(-?\d+)-[0-9a-f]{8}\.json$", path.name) for path in self.folder.glob("*/*/*.json"))
        return sorted({int(match[1]) for match in matches if match})

    def is_done(self, cell: BenchCell) -> bool:
        """Whether there is a result; a failure is none."""
        result = self.load(cell)
        return result is not None and "failed" not in result

    def save(self, cell: BenchCell, result: Mapping[str, Any]) -> None:
        """Write a cell's result."""
        about = {"format": FORMAT, "hash": cell.hash, "seed": cell.group.recipe.seed, "config": cell.config()}
        write_text(self.target(cell), json.dumps({**about, **result}, indent=1, sort_keys=False) + "\n")


def _beside(result: Path) -> Path:
    return result.with_suffix(".time.json")


def _load(path: Path, cell: BenchCell, hash_in: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is not a result ({error}): remove it, and its cell is measured again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        version = content.get("format") if isinstance(content, dict) else None
        raise ArtifactError(
            f"{path} is a result of format {version}, and this fedup reads and writes {FORMAT}: keep that folder "
            "for the version that wrote it, and choose another with --results. Nothing was changed."
        )
    if content.get("hash") != cell.hash or hash_in(content) != cell.hash:
        raise ArtifactError(f"{path} says it is of another configuration: it was edited or renamed. Remove it.")
    return content
