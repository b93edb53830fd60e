"""All tables and pages from result files: a report of each experiment, and a Markdown file for all else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedup.bench.attacks.run import attacks_table
from fedup.bench.experiment import load_experiment
from fedup.bench.experiment_report import write_report
from fedup.bench.readme_table import write_results
from fedup.bench.results import Results
from fedup.bench.scale_table import flower_table, scale_table
from fedup.bench.speed.table import speed_table
from fedup.bench.summary import summarize
from fedup.bench.tables import GENERATED
from fedup.bench.times_table import Summed, write_times
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


def write_tables(benchmarks: Path, experiments: Sequence[Path] = (), results: Path | None = None) -> list[Path]:
    """Write the reports of these experiments; without any, of all that is found below the folder."""
    results = results or benchmarks / "results"
    summed: list[Summed] = []
    written: list[Path] = []
    for path in experiments:
        report = _write_experiment(path, benchmarks, results, summed)
        if not report:
            raise DataError(
                f"There is no result of {path} in {results / path.stem}: run `fedup bench run {path}` first."
            )
        written += report
    if experiments:
        return written
    written = write_result_tables(benchmarks)
    for path in sorted((benchmarks / "experiments").glob("*.toml")):
        written += _write_experiment(path, benchmarks, results, summed)
    if summed:
        written += write_times(summed, benchmarks)
        write_results(summed, benchmarks)
    if not written:
        raise DataError(
            f"No result was found below {benchmarks}: run `fedup bench run` first, and name the experiment, as in "
            "`fedup bench report EXPERIMENT.toml --results FOLDER`, where it lies elsewhere."
        )
    return written


def _write_experiment(path: Path, benchmarks: Path, results: Path, summed: list[Summed]) -> list[Path]:
    """The report of one experiment, where it has results, which are added to those summed up."""
    experiment = load_experiment(path)
    blocks = summarize(experiment, Results(results / experiment.name))
    if not blocks:
        return []
    summed.append((experiment, blocks))
    return write_report(experiment, blocks, tables=benchmarks / "tables", pages=benchmarks / "pages")


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
