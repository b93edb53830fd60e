"""All tables and pages from result files: a report of each experiment, and a Markdown file for all else."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedup.bench.attacks.flower_table import hostile_table
from fedup.bench.attacks.run import attacks_table
from fedup.bench.exact_table import exact_table
from fedup.bench.experiment import Experiment, load_experiment
from fedup.bench.experiment_report import write_report
from fedup.bench.goals import judge_goals
from fedup.bench.readme_table import write_results
from fedup.bench.results import Results
from fedup.bench.scale_table import flower_table, scale_table
from fedup.bench.server_work_table import server_work_table
from fedup.bench.speed.table import speed_table
from fedup.bench.summary import Block, summarize
from fedup.bench.tables import GENERATED
from fedup.bench.times_table import Summed, write_times
from fedup.bench.withdrawals_table import withdrawals_table
from fedup.errors import DataError
from fedup.files import write_text
from fedup.page import TEMPLATES, render

_FORMAT = 1  # of what is recorded of a report
Table = Callable[[Sequence[dict[str, Any]]], str]


def _a_section_each(section: Callable[[dict[str, Any]], str]) -> Table:
    return lambda results: "\n\n".join(map(section, results))


TABLES: dict[str, Table] = {
    "speed": _a_section_each(speed_table),
    "scale": _a_section_each(scale_table),
    "server_work": _a_section_each(server_work_table),
    "flower": _a_section_each(flower_table),
    "results/attacks": attacks_table,
    "results/attacks_flower": hostile_table,
    "results/withdrawals": withdrawals_table,
    "results/exact": exact_table,
}


def write_tables(benchmarks: Path, experiments: Sequence[Path] = (), results: Path | None = None) -> list[Path]:
    """Write the reports of these experiments that changed; without any, of all that is found below the folder."""
    results = results or benchmarks / "results"
    summed: list[Summed] = []
    written = [] if experiments else write_result_tables(benchmarks)
    for path in experiments or sorted((benchmarks / "experiments").glob("*.toml")):
        experiment = load_experiment(path)
        blocks = summarize(experiment, Results(results / experiment.name))
        if blocks:
            summed.append((experiment, blocks))
            written += _write_changed(experiment, blocks, benchmarks)
        elif experiments:
            raise DataError(
                f"There is no result of {path} in {results / path.stem}: run `fedup bench run {path}` first."
            )
    if summed:
        written += _write_index(benchmarks / "pages")
        written += [] if experiments else [*write_times(summed, benchmarks), *write_results(summed, benchmarks)]
    elif not written:
        raise DataError(
            f"No result was found below {benchmarks}: run `fedup bench run` first, and name the experiment, as in "
            "`fedup bench report EXPERIMENT.toml --results FOLDER`, where it lies elsewhere."
        )
    return written


def _write_changed(experiment: Experiment, blocks: Sequence[Block], benchmarks: Path) -> list[Path]:
    """The report of an experiment, unless its files are still what these results and this code make."""
    tables, pages = benchmarks / "tables", benchmarks / "pages"
    record = pages / f".{experiment.name}.json"
    made = _made(record)
    inputs = f"{_code()} {experiment!r} {blocks!r}"
    if made and made["digest"] == _digest(inputs, [benchmarks / path for path in made["files"]]):
        return []
    written = write_report(experiment, blocks, tables=tables, pages=pages)
    made = {
        "format": _FORMAT,
        "digest": _digest(inputs, written),
        "files": [path.relative_to(benchmarks).as_posix() for path in written],
        "entry": _entry(experiment, blocks),
    }
    write_text(record, json.dumps(made, indent=1) + "\n")
    return written


def _entry(experiment: Experiment, blocks: Sequence[Block]) -> dict[str, Any]:
    """An experiment in the index."""
    goals = list(judge_goals(experiment.goals, blocks))
    seeds = {len(row.seeds) for block in blocks for row in block.rows if row.seeds} or {0}
    return {
        "name": experiment.name,
        "title": experiment.title,
        "federations": list(dict.fromkeys(block.federation for block in blocks)),
        "scenarios": list(dict.fromkeys(block.scenario.name for block in blocks)),
        "methods": len({row.method.name for block in blocks for row in block.rows}),
        "n": str(max(seeds)) if len(seeds) == 1 else f"{min(seeds)}–{max(seeds)}",
        "goals": f"{sum(not goal.missed_by for goal in goals)} of {len(goals)}" if goals else "–",
    }


def _write_index(pages: Path) -> list[Path]:
    """The page that leads to all others, from what is recorded of each."""
    entries = [made["entry"] for path in sorted(pages.glob(".*.json")) if (made := _made(path))]
    path, text = pages / "index.html", render("index", {"entries": entries})
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return []
    write_text(path, text)
    return [path]


def _made(record: Path) -> dict[str, Any]:
    """What is recorded of a report; nothing where there is none, or none of this format."""
    try:
        made = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return made if isinstance(made, dict) and made.get("format") == _FORMAT else {}


def _digest(inputs: str, files: Sequence[Path]) -> str:
    """A digest of what a report is made of and of the files it was made into; a missing file is as an empty one."""
    parts = [inputs.encode(), *(path.read_bytes() if path.is_file() else b"" for path in files)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@cache
def _code() -> str:
    """A digest of all that makes reports: this room, the templates, and the library that draws."""
    from matplotlib import __version__

    digest = hashlib.sha256(__version__.encode())
    for path in sorted([*Path(__file__).parent.rglob("*.py"), *TEMPLATES.iterdir(), TEMPLATES.parent / "page.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
