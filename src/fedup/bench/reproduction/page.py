"""One page of all tables and figures of the paper, and the part of docs/reproduction.md that readers cite."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedup.bench.figures import accuracy_by_steps, retained_before_and_after, times_by_pair
from fedup.bench.format import show_count
from fedup.bench.metrics import columns_of
from fedup.bench.reproduction.claims import Blocks, Verdict, judge
from fedup.bench.reproduction.grid import MISSING, NO_TIME, SHARED, Line, lines_of
from fedup.bench.reproduction.pool import Pool
from fedup.bench.reproduction.queue import Queue, make_queue
from fedup.bench.reproduction.tables import PaperTable, load_tables
from fedup.bench.summary import Block, summarize
from fedup.bench.tables import markdown_table
from fedup.bench.times_table import fill
from fedup.files import write_text
from fedup.page import render

BEGIN, END = "<!-- reproduction: written by `fedup bench paper --report` -->", "<!-- /reproduction -->"
PAGE = "reproduction.html"
_PAPER_ORDER = 11  # tables and figures of the paper itself; what comes after are questions of our own


@dataclass(frozen=True)
class Section:
    """A table with all that is known of it."""

    table: PaperTable
    blocks: Blocks
    lines: Sequence[Line]
    verdicts: Sequence[Verdict]
    done: int
    ready: int
    waiting: int

    @property
    def untimed(self) -> int:
        """Cells that are there, whose clean time is not."""
        times = [line for line in self.lines if line.column.key == "time"]
        return sum(cell.text.endswith((SHARED, NO_TIME)) for line in times for cell in line.cells)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.ready + self.waiting + self.untimed

    @property
    def state(self) -> str:
        """How much of it is there."""
        left, times = self.ready + self.waiting, f"{show_count(self.untimed, 'clean time')} not taken yet"
        cells = f"{self.done} of {self.done + left} cells, {left} {MISSING}" if left else "all cells"
        return "complete" if self.is_complete else f"{cells}, {times}" if self.untimed else cells


def write_page(benchmarks: Path, results: Path | None = None) -> list[Path]:
    """Write pages/reproduction.html, and the part of docs/reproduction.md between its marks."""
    folder, pool = benchmarks / "experiments" / "paper", Pool(results or benchmarks / "results")
    tables = load_tables(folder)
    queue = make_queue(tables, pool, folder=folder)
    sections = [_section(table, pool, queue) for table in tables]
    path = benchmarks / "pages" / PAGE
    write_text(path, render("paper", _content(sections, queue)))
    document = benchmarks.resolve().parent / "docs" / "reproduction.md"
    return [path, *fill(document, citable(sections, queue), BEGIN, END)]


def _section(table: PaperTable, pool: Pool, queue: Queue) -> Section:
    blocks = {part.name: summarize(part.experiment, pool, part.experiment.seeds) for part in table.parts}
    return Section(table, blocks, lines_of(table, blocks), judge(table, blocks), *queue.of(table))


def citable(sections: Sequence[Section], queue: Queue) -> str:
    """What holds and what does not, in one table, and where it comes from."""
    rows = [
        [section.table.about.number, verdict.claim.text, f"**{verdict.word}**", verdict.where]
        for section in sections
        for verdict in section.verdicts
        if not verdict.claim.ours
    ]
    ours = [
        [section.table.about.number, verdict.claim.text, f"**{verdict.word}**", verdict.where]
        for section in sections
        for verdict in section.verdicts
        if verdict.claim.ours
    ]
    head = ["of the paper", "claim", "here", "where"]
    cells = [[s.table.about.number, s.table.title, s.state] for s in sections]
    return "\n\n".join(
        [
            _summary(sections, queue),
            markdown_table(head, rows),
            "### Our own method under the same bounds",
            markdown_table(head, ours),
            "### How much is measured",
            "A cell is one method with one seed in one place; several tables share cells.",
            markdown_table(["of the paper", "about", "cells"], cells),
            _origin(sections),
        ]
    )


def _summary(sections: Sequence[Section], queue: Queue) -> str:
    """Counts, in sentences."""
    words = Counter(verdict.word for section in sections for verdict in section.verdicts if not verdict.claim.ours)
    texts = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    of_paper = [section for section in sections if section.table.about.order <= _PAPER_ORDER]
    full = sum(section.is_complete for section in of_paper)
    missing = len(queue.cells) + len(queue.later)
    counts = f"Of the paper's {len(of_paper)} tables and figures {full} are complete. Of its claims: {texts}."
    if not missing:
        return f"{counts} No cell is missing."
    left = f"{show_count(missing, 'cell')} {'is' if missing == 1 else 'are'} {MISSING}"
    waiting = f"; {len(queue.later)} of them wait for settings that are not chosen yet" if queue.later else ""
    return f"{counts} {left}{waiting}."


def _origin(sections: Sequence[Section]) -> str:
    blocks = [block for section in sections for own in section.blocks.values() for block in own]
    seeds = sorted({seed for block in blocks for row in block.rows for seed in row.results})
    commits = sorted({commit for block in blocks for commit in block.commits})
    machines = sorted({machine.split(" (")[0] for block in blocks for machine in block.machines})
    return (
        f"Seeds {', '.join(map(str, seeds))}. On {'; '.join(machines)}. Commits {', '.join(commits)}. "
        "Every cell's command stands beside it on the page."
    )


def _content(sections: Sequence[Section], queue: Queue) -> dict[str, Any]:
    return {
        "summary": _summary(sections, queue),
        "origin": _origin(sections),
        "missing": MISSING,
        "commands": queue.commands,
        "sections": [_shown(section) for section in sections],
    }


def _shown(section: Section) -> dict[str, Any]:
    """A section for the template."""
    table = section.table
    by_place: dict[tuple[str, str, str], list[Line]] = {}
    for line in section.lines:
        by_place.setdefault(line.place, []).append(line)
    draw = _FIGURES.get(table.about.figure)
    svg = draw(section) if draw else ""
    columns = columns_of(*table.about.shows)
    return {
        "name": table.name,
        "number": table.about.number,
        "title": table.title,
        "label": table.about.label,
        "note": table.about.note,
        "state": section.state,
        "is_figure": bool(draw),
        "figure": svg,
        "heads": list(table.about.columns.values()),
        "places": [{"name": _place(place), "lines": lines} for place, lines in by_place.items()],
        "verdicts": section.verdicts,
        "counts": Counter((verdict.word, verdict.tone) for verdict in section.verdicts).items(),
        "legend": [(column.title, column.about) for column in columns],
        "attack": any(line.mark for line in section.lines),
        "shared": any(SHARED in cell.text for line in section.lines for cell in line.cells),
    }


def _place(place: tuple[str, str, str]) -> str:
    return ", ".join(word for word in place if word)


def _before_after(section: Section) -> str:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    columns = section.table.about.columns
    for block in _blocks(section):
        means = {title: _mean(block, method, "r_a") for method, title in columns.items()}
        found = {title: value for title, value in means.items() if value is not None}
        if len(found) > 1:
            panels.setdefault(f"{block.scenario.name} requests", {})[block.federation] = found
    return retained_before_and_after(panels, next(iter(columns.values()))) if panels else ""


def _times(section: Section) -> str:
    seconds: dict[str, dict[str, float]] = {}
    for block in _blocks(section):
        for method, title in section.table.about.columns.items():
            if value := _mean(block, method, "time"):
                seconds.setdefault(block.federation, {})[title] = value
    return times_by_pair(seconds) if seconds else ""


def _steps(section: Section) -> str:
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for block in _blocks(section):
        curves: dict[str, list[tuple[int, float]]] = {}
        for method, title in section.table.about.columns.items():
            row, value = block.row(method), _mean(block, method, "r_a")
            steps = getattr(row.method.settings, "steps", None) if row else None
            if steps is not None and value is not None:
                curves.setdefault(title.rpartition(",")[0], []).append((steps, value))
        if curves and all(len(points) > 1 for points in curves.values()):
            panels[block.federation] = curves
    return accuracy_by_steps(panels) if panels else ""


_FIGURES: Mapping[str, Callable[[Section], str]] = {"before_after": _before_after, "times": _times, "steps": _steps}


def _blocks(section: Section) -> list[Block]:
    return [block for own in section.blocks.values() for block in own]


def _mean(block: Block, method: str, key: str) -> float | None:
    row = block.row(method)
    values = list(row.values(key).values()) if row else []
    return statistics.fmean(values) if values else None
