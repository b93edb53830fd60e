"""The README's table of results: FedUP beside Retrain and the original model, in one experiment."""

from collections.abc import Sequence
from pathlib import Path

from fedup.bench.experiment import REFERENCE
from fedup.bench.summary import ORIGINAL, Block
from fedup.bench.tables import markdown_table
from fedup.bench.times_table import Summed, fill
from fedup.bench.verdicts import OURS

EXPERIMENT = "baselines"
BEGIN, END = "<!-- results: written by `fedup bench report` -->", "<!-- /results -->"
_HEAD = ["federation", "request", "retained accuracy", "forgotten", "distance to Retrain (TV)", "its floor"]


def results_table(summed: Sequence[Summed]) -> str:
    """Means over seeds: original → FedUP, and Retrain in brackets; empty where the experiment has no result."""
    blocks = [block for experiment, blocks in summed if experiment.name == EXPERIMENT for block in blocks]
    rows = [line for block in blocks if (line := _line(block))]
    if not rows:
        return ""
    seeds = min(len(row.seeds) for block in blocks if (row := block.row(OURS)))
    about = (
        f"Original → FedUP (Retrain), means of {seeds} seeds. *Forgotten*: F-A, or for samples ASR; the aim is "
        "Retrain's figure. *Floor*: the distance of a second Retrain. "
        f"[All methods and figures](benchmarks/tables/{EXPERIMENT}.md)."
    )
    return f"{markdown_table(_HEAD, rows)}\n\n{about}"


def write_results(summed: Sequence[Summed], benchmarks: Path) -> list[Path]:
    """Write the table between its marks in the README, where it has them."""
    table = results_table(summed)
    return fill(benchmarks.resolve().parent / "README.md", table, BEGIN, END) if table else []


def _line(block: Block) -> list[str]:
    """The cells of one federation and scenario; none where a method has no result."""
    forgotten = "asr" if block.scenario.use == "sample" else "f_a"
    line = [block.federation, block.scenario.name]
    for key in ("r_a", forgotten):
        before, ours, reference = (_mean(block, method, key) for method in (ORIGINAL, OURS, REFERENCE))
        if "" in (before, ours, reference):
            return []
        line.append(f"{before} → {ours} ({reference})")
    floor = block.floor.method.name if block.floor else ""
    return [*line, _mean(block, OURS, "tv"), _mean(block, floor, "tv")]


def _mean(block: Block, method: str, key: str) -> str:
    figure = row.figure(key) if (row := block.row(method)) else None
    return f"{figure.mean:.3f}" if figure else ""
