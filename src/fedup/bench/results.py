"""Results on disk: one JSON file for each cell, named by its configuration, written whole or not at all; beside it its
clean times, where they were taken."""

import json
import re
from collections.abc import Mapping
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
        """Where a cell's result lies: another configuration has another file, so nothing is ever overwritten by it."""
        group = self.folder / cell.group.federation / cell.group.scenario.name
        return group / f"{cell.method.name}-seed{cell.group.recipe.seed}-{cell.hash[:8]}.json"

    def timing_path(self, cell: BenchCell) -> Path:
        """Where a cell's clean times lie: beside its result, which they leave as it is."""
        return self.path(cell).with_suffix(".time.json")

    def load(self, cell: BenchCell) -> dict[str, Any] | None:
        """A cell's result, or None where there is none yet."""
        result = _load(self.path(cell), cell)
        if result is not None and hash_of(result.get("config", {})) != cell.hash:
            raise _of_another(self.path(cell))
        return result

    def load_timing(self, cell: BenchCell) -> dict[str, Any] | None:
        """What `fedup bench time` took of a cell, or None where it did not."""
        return _load(self.timing_path(cell), cell)

    def save_timing(self, cell: BenchCell, taken: Mapping[str, Any]) -> None:
        """Write a cell's times beside its result."""
        about = {"format": FORMAT, "hash": cell.hash, "seed": cell.group.recipe.seed}
        write_text(self.timing_path(cell), json.dumps({**about, **taken}, indent=1) + "\n")

    def seeds(self) -> list[int]:
        """The seeds of which there are results."""
        matches = (re.search(r"-seed(-?\d+)-[0-9a-f]{8}\.json$", path.name) for path in self.folder.glob("*/*/*.json"))
        return sorted({int(match[1]) for match in matches if match})

    def is_done(self, cell: BenchCell) -> bool:
        """Whether there is a result; a failure is none."""
        result = self.load(cell)
        return result is not None and "failed" not in result

    def save(self, cell: BenchCell, found: Mapping[str, Any]) -> None:
        """Write a cell's result."""
        about = {"format": FORMAT, "hash": cell.hash, "seed": cell.group.recipe.seed, "config": cell.config()}
        write_text(self.path(cell), json.dumps({**about, **found}, indent=1, sort_keys=False) + "\n")


def _load(path: Path, cell: BenchCell) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is not a result ({error}): remove it, and its cell is measured again.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise ArtifactError(
            f"{path} is a result of format {version}, and this fedup reads and writes {FORMAT}: keep that folder "
            "for the version that wrote it, and choose another with --results. Nothing was changed."
        )
    if found.get("hash") != cell.hash:
        raise _of_another(path)
    return found


def _of_another(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} says it is of another configuration: it was edited or renamed. Remove it.")
