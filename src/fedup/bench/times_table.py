"""The table of clean times, and its part in the README; ratios of times come only from here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedup.bench.experiment import REFERENCE, Experiment
from fedup.bench.format import show_seconds
from fedup.bench.summary import Block, Row
from fedup.bench.tables import GENERATED, markdown_table
from fedup.bench.verdicts import OURS
from fedup.files import write_text
from fedup.tasks.machine import show_commit

Summed = tuple[Experiment, Sequence[Block]]

NONE = "No clean time has been taken yet: `fedup bench time benchmarks/experiments/main.toml` takes them."
BEGIN, END = "<!-- times: written by `fedup bench report` -->", "<!-- /times -->"
_ABOUT = (
    "Seconds from the request to the final model, as `fedup bench time EXPERIMENT` takes them: one process on an idle "
    "device, a warm-up, then the median of three runs (the fastest and the slowest beside it). Trained federations are "
    "there before, and what clients sent ahead of the request has a column of its own. × is Retrain's time over the "
    "method's, with the same seed on the same device: below 1 the method is slower than retraining. Times that were "
    "measured otherwise are in no ratio."
)
_HEAD = ["federation", "scenario", "method", "seed", "time", "three runs", "×", "time to effect", "time ahead"]


def times_table(summed: Sequence[Summed]) -> str:
    """All clean times in Markdown."""
    parts = ["# Clean times", _ABOUT]
    for experiment, blocks in summed:
        rows = [line for block in blocks for line in _lines(block)]
        if rows:
            timings = [timing for block in blocks for row in block.rows for timing in row.times.values()]
            places = "; ".join(dict.fromkeys(block.timed_on for block in blocks if block.timed_on))
            commits = ", ".join(sorted({show_commit(timing["code"]) for timing in timings}))
            origin = f"On {places}. Commit {commits}."
            parts += [f"## {experiment.name}: {experiment.title}", origin, markdown_table(_HEAD, rows)]
    return "\n\n".join(parts if len(parts) > 2 else [*parts, NONE])


def short_table(summed: Sequence[Summed]) -> str:
    """FedUP beside Retrain, for the README."""
    rows, places = [], []
    for experiment, blocks in summed:
        for block in blocks:
            ours, reference = block.row(OURS), block.row(REFERENCE)
            if ours is None or reference is None:
                continue
            for seed in sorted(set(ours.times) & set(reference.times)):
                times = [show_seconds(row.times[seed]["median"]["time"]) for row in (reference, ours)]
                where = [f"[{experiment.name}](benchmarks/tables/{experiment.name}.md)", block.federation]
                rows.append([*where, block.scenario.name, str(seed), *times, _ratio(ours, reference, seed)])
                places.append(block.timed_on)
    if not rows:
        return NONE
    head = ["experiment", "federation", "scenario", "seed", "Retrain", "FedUP", "×"]
    return f"{markdown_table(head, rows)}\n\nOn {'; '.join(dict.fromkeys(places))}."


def write_times(summed: Sequence[Summed], benchmarks: Path) -> list[Path]:
    """Write times.md, and the README's part between its marks where there is one."""
    path = benchmarks / "tables" / "times.md"
    write_text(path, f"{GENERATED.format(folder='benchmarks/results')}\n\n{times_table(summed)}\n")
    return [path, *fill(benchmarks.resolve().parent / "README.md", short_table(summed))]


def fill(path: Path, text: str, begin: str = BEGIN, end: str = END) -> list[Path]:
    """Put a text between the marks of a document; one without marks is left as it is."""
    document = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, _, rest = document.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_end:
        return []
    write_text(path, f"{before}{begin}\n{text}\n{end}{after}")
    return [path]


def _lines(block: Block) -> Iterator[list[str]]:
    reference = block.row(REFERENCE)
    for row in block.rows:
        for seed, timing in sorted(row.times.items()):
            median, runs = timing["median"], [run["time"] for run in timing["runs"]]
            yield [
                block.federation,
                block.scenario.name,
                row.method.name,
                str(seed),
                show_seconds(median["time"]),
                " … ".join(show_seconds(one) for one in (min(runs), max(runs))),
                _ratio(row, reference, seed),
                *(
                    "never" if median[key] is None else show_seconds(median[key])
                    for key in ("time_to_effect", "ahead_time")
                ),
            ]


def _ratio(row: Row, reference: Row | None, seed: int) -> str:
    """Retrain's time over the method's."""
    if reference is None or row is reference or seed not in reference.times:
        return "–"
    theirs, own = (one.times[seed]["median"]["time"] for one in (reference, row))
    if not own:
        return "–"
    ratio = theirs / own
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"
