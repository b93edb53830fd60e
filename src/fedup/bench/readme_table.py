"""The README's table of results: FedUP beside Retrain and the original model, by both of its filters."""

from collections.abc import Sequence
from pathlib import Path

from fedup.bench.experiment import REFERENCE
from fedup.bench.summary import ORIGINAL, Block
from fedup.bench.tables import markdown_table
from fedup.bench.times_table import Summed, fill
from fedup.bench.verdicts import OURS

SOURCES = {
    "closed_form": ("closed_form_counted", "closed form"),
    "baselines": (OURS, "gradient steps"),
}  # method, filter
BEGIN, END = "<!-- results: written by `fedup bench report` -->", "<!-- /results -->"
_HEAD = ["filter", "federation", "request", "retained accuracy", "forgotten", "distance to Retrain (TV)", "its floor"]


def results_table(summed: Sequence[Summed]) -> str:
    """Means over seeds: original → FedUP, and Retrain in brackets; empty where no experiment has a result."""
    by_name = {experiment.name: blocks for experiment, blocks in summed}
    rows, seeds = list[list[str]](), set[int]()
    for name, (method, words) in SOURCES.items():
        for block in by_name.get(name, []):
            if (line := _line(block, method)) and (row := block.row(method)):
                rows.append([words, *line])
                seeds.add(len(row.seeds))
    if not rows:
        return ""
    links = " and ".join(f"[{name}](benchmarks/tables/{name}.md)" for name in SOURCES if name in by_name)
    about = (
        f"Original → FedUP (Retrain), means of {', '.join(map(str, sorted(seeds)))} seeds. *Closed form*: the "
        "default, with clients that count. *Gradient steps*: the paper's filter, for samples an eraser. *Forgotten*: "
        "F-A, or for samples ASR; the aim is Retrain's figure. "
        f"*Floor*: the distance of a second Retrain. All methods, figures and machines: {links}."
    )
    return f"{markdown_table(_HEAD, rows)}\n\n{about}"


def write_results(summed: Sequence[Summed], benchmarks: Path) -> list[Path]:
    """Write the table between its marks in the README, where it has them."""
    table = results_table(summed)
    return fill(benchmarks.resolve().parent / "README.md", table, BEGIN, END) if table else []


def _line(block: Block, method: str) -> list[str]:
    """The cells of one federation and scenario; none where a method has no result."""
    forgotten = "asr" if block.scenario.use == "sample" else "f_a"
    line = [block.federation, block.scenario.name]
    for key in ("r_a", forgotten):
        before, ours, reference = (_mean(block, each, key) for each in (ORIGINAL, method, REFERENCE))
        if "" in (before, ours, reference):
            return []
        line.append(f"{before} → {ours} ({reference})")
    floor = block.floor.method.name if block.floor else ""
    return [*line, _mean(block, method, "tv"), _mean(block, floor, "tv")]


def _mean(block: Block, method: str, key: str) -> str:
    figure = row.figure(key) if (row := block.row(method)) else None
    return f"{figure.mean:.3f}" if figure else ""
