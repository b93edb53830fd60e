"""All stored results, whichever experiment they were measured for: a cell is found by the hash of its configuration."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedup.bench.experiment import BenchCell
from fedup.bench.results import Results

OWN = "paper"  # the folder of results that no other experiment has
_RESULT = re.compile(r"-seed-?\d+-([0-9a-f]{8})\.json$")


class Pool(Results):
    """Results of all experiments below a folder; new ones go to `paper/`, and nothing that is there is overwritten
    there. A cell of a group with a shadow model needs a result that was measured with one."""

    def __init__(self, results: Path) -> None:
        super().__init__(results / OWN)
        self._files: dict[str, list[Path]] = {}
        self._read: dict[Path, Mapping[str, Any]] = {}
        own_first = sorted(results.glob("*/*/*/*.json"), key=lambda path: (path.parts[-4] != OWN, str(path)))
        for path in own_first:
            if match := _RESULT.search(path.name):
                self._files.setdefault(match[1], []).append(path)

    def path(self, cell: BenchCell) -> Path:
        """The file of a cell's result, in any folder; a new one's where there is none."""
        found = self._found(cell)
        return found[0] if found else self.target(cell)

    def target(self, cell: BenchCell) -> Path:
        """The file that a new result is written to."""
        return super().path(cell)

    def timing_path(self, cell: BenchCell) -> Path:
        """The clean times of any result of the cell, else beside the result that counts."""
        times = [path.with_suffix(".time.json") for path in self._all(cell)]
        return next((path for path in times if path.exists()), super().timing_path(cell))

    def save(self, cell: BenchCell, result: Mapping[str, Any]) -> None:
        super().save(cell, result)
        target = self.target(cell)
        known = self._files.setdefault(cell.hash[:8], [])
        self._files[cell.hash[:8]] = [target, *(path for path in known if path != target)]
        self._read.pop(target, None)

    def results(self) -> list[Mapping[str, Any]]:
        """All of them, each with its clean times under `timing` where there are any."""
        found: list[Mapping[str, Any]] = []
        for path in (path for paths in self._files.values() for path in paths):
            timing = path.with_suffix(".time.json")
            found.append({**self._content(path), "timing": self._content(timing) if timing.exists() else None})
        return found

    def _found(self, cell: BenchCell) -> list[Path]:
        """Files of the cell's configuration that were measured with what it needs; those without failure first."""
        able = [path for path in self._all(cell) if not cell.group.shadow or _shows_shadow(self._content(path))]
        return sorted(able, key=lambda path: "failed" in self._content(path))

    def _all(self, cell: BenchCell) -> list[Path]:
        digest = cell.hash
        return [path for path in self._files.get(digest[:8], ()) if self._content(path).get("hash") == digest]

    def _content(self, path: Path) -> Mapping[str, Any]:
        if path not in self._read:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # damaged, or taken away: as if it were not there
                content = {}
            self._read[path] = content if isinstance(content, dict) else {}
        return self._read[path]


def _shows_shadow(result: Mapping[str, Any]) -> bool:
    return bool(result.get("shadow") or result.get("not_supported"))
