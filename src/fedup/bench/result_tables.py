"""Tables of all that is measured besides experiments: one Markdown file for each folder of result files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedup.bench.attacks.run import attacks_table
from fedup.bench.flower_table import flower_table
from fedup.bench.scale_table import scale_table
from fedup.bench.speed.table import speed_table
from fedup.bench.tables import GENERATED
from fedup.bench.withdrawals_table import withdrawals_table
from fedup.errors import DataError
from fedup.files import write_text

Table = Callable[[Sequence[dict[str, Any]]], str]


def _a_section_each(section: Callable[[dict[str, Any]], str]) -> Table:
    return lambda results: "\n\n".join(map(section, results))


TABLES: dict[str, Table] = {
    "speed": _a_section_each(speed_table),
    "scale": _a_section_each(scale_table),
    "flower": _a_section_each(flower_table),
    "results/attacks": attacks_table,
    "results/withdrawals": withdrawals_table,
}


def write_result_tables(benchmarks: Path) -> list[Path]:
    """Make tables/NAME.md of the result files in each folder that has any."""
    written = []
    for folder, table in TABLES.items():
        results = [_read(path, table) for path in sorted((benchmarks / folder).glob("*.json"))]
        if results:
            path = benchmarks / "tables" / f"{Path(folder).name}.md"
            write_text(path, GENERATED.format(folder=f"benchmarks/{folder}") + "\n" + table(results) + "\n")
            written.append(path)
    return written


def _read(path: Path, table: Table) -> dict[str, Any]:
    """A file's content, if a table can be made of it."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        table([result])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is no result of this version ({error!r}): measure again, or remove it.") from error
    return result
