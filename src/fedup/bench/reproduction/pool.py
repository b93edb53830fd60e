"""All stored results, whichever experiment they were measured for: a cell is found by the hash of its configuration."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedup.bench.experiment import BenchCell
from fedup.bench.results import Results

OWN = "paper"  # the folder of results that no other experiment has
_NAME = re.compile(r"-seed-?\d+-([0-9a-f]{8})(\.time)?\.json$")


class Pool(Results):
    """Results of all experiments below a folder. New results and times go to `paper/`: those of other experiments are
    read and never written. A cell of a group with a shadow model needs a result that was measured with one."""

    def __init__(self, results: Path) -> None:
        super().__init__(results / OWN)
        self._files: dict[str, list[Path]] = {}  # by the hash in their names
        self._times: dict[str, list[Path]] = {}
        self._read: dict[Path, Mapping[str, Any]] = {}
        own_first = sorted(results.glob("*/*/*/*.json"), key=lambda path: (path.parts[-4] != OWN, str(path)))
        for path in own_first:
            if match := _NAME.search(path.name):
                (self._times if match[2] else self._files).setdefault(match[1], []).append(path)

    def path(self, cell: BenchCell) -> Path:
        """The file of a cell's result, in any folder; a new one's where there is none."""
        found = self._found(cell)
        return found[0] if found else self.target(cell)

    def target(self, cell: BenchCell) -> Path:
        """The file that a new result is written to."""
        return super().path(cell)

    def timing_path(self, cell: BenchCell) -> Path:
        """The clean times of the cell, in any folder; the own folder's come first."""
        digest = cell.hash
        times = [path for path in self._times.get(digest[:8], ()) if self._content(path).get("hash") == digest]
        return times[0] if times else super().timing_path(cell)

    def save(self, cell: BenchCell, result: Mapping[str, Any]) -> None:
        super().save(cell, result)
        target = self.target(cell)
        known = self._files.setdefault(cell.hash[:8], [])
        self._files[cell.hash[:8]] = [target, *(path for path in known if path != target)]
        self._read.pop(target, None)

    def save_timing(self, cell: BenchCell, taken: Mapping[str, Any]) -> None:
        super().save_timing(cell, taken)
        target = self.target(cell).with_suffix(".time.json")
        known = self._times.get(cell.hash[:8], [])
        self._times[cell.hash[:8]] = [target, *(path for path in known if path != target)]
        self._read.pop(target, None)

    def results(self) -> list[Mapping[str, Any]]:
        """All of them, each with its clean times under `timing` where there are any."""
        found: list[Mapping[str, Any]] = []
        for key, paths in self._files.items():
            timing = next((self._content(path) for path in self._times.get(key, ())), None)
            found += [{**self._content(path), "timing": timing} for path in paths]
        return found

    def _found(self, cell: BenchCell) -> list[Path]:
        """Files of the cell's configuration that were measured with what it needs; those without failure first."""
        able = [path for path in self._all(cell) if not cell.group.shadow or _shows_shadow(self._content(path))]
        return sorted(able, key=lambda path: "failed" in self._content(path))

    def _all(self, cell: BenchCell) -> list[Path]:
        digest, target = cell.hash, self.target(cell)
        known = self._files.get(digest[:8], [])
        if target not in known and target.exists():  # another process has measured it, meanwhile
            known = self._files[digest[:8]] = [target, *known]
        return [path for path in known if self._content(path).get("hash") == digest]

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
