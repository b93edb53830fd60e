"""A table of the paper as lines and cells: our figure, the paper's, how many seeds, and the difference in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedup.bench.experiment import REFERENCE
from fedup.bench.format import show_value
from fedup.bench.metrics import Column, columns_of
from fedup.bench.reproduction.claims import Blocks
from fedup.bench.reproduction.tables import PaperTable, Part
from fedup.bench.summary import Block, Row

MISSING, NO_TIME, SHARED = "not run yet", "no clean time yet", "‡"
_OURS = ("fedup_paper", "fedup_authors")  # the column that is the paper's method
_CLOSE = 0.01  # of a share: figures count as the same


@dataclass(frozen=True)
class GridCell:
    """One figure of one method."""

    text: str
    value: float | None
    paper: float | None
    paper_text: str
    n: str  # deviation and number of seeds
    missing: bool  # some of its results are not there


@dataclass(frozen=True)
class Line:
    """One figure in one place, for all methods."""

    place: tuple[str, str, str]  # federation, scenario, part
    column: Column
    cells: tuple[GridCell, ...]
    words: str
    command: str
    mark: str  # † where an attack did not take


def lines_of(table: PaperTable, blocks: Blocks) -> list[Line]:
    """All lines of a table, place by place."""
    found = []
    for part in table.parts:
        by_place = {(block.federation, block.scenario.name): block for block in blocks[part.name]}
        for federation, scenario in part.places():
            block = by_place.get((federation, scenario))
            for column in _shown(table, part, (federation, scenario), block):
                found.append(_line(table, part, (federation, scenario), block, column))
    return found


def _shown(table: PaperTable, part: Part, place: tuple[str, str], block: Block | None) -> list[Column]:
    """The figures that some method has there, or that the paper prints; without any result the first."""
    wanted, methods = columns_of(*table.about.shows), list(table.about.columns)
    shown = []
    for column in wanted:
        rows = [row for method in methods if block and (row := block.row(method))]
        has_ours = any(row.figure(column.key) or row.uncounted(column.key) for row in rows)
        if has_ours or any(table.printed(*place, method, column.key) is not None for method in methods):
            shown.append(column)
    return shown or wanted[:1]


def _line(table: PaperTable, part: Part, place: tuple[str, str], block: Block | None, column: Column) -> Line:
    seeds = table.seeds_of(part, place[0])
    cells = []
    for method in table.about.columns:
        paper = table.printed(*place, method, column.key)
        row = block.row(method) if block else None
        text, value = _text(row, column)
        there = [seed for seed in seeds if row and seed in row.results]
        paper_text = "" if paper is None else _as_printed(paper, column)
        n = _count(row, column, len(seeds)) if value is not None else ""
        cells.append(GridCell(text, value, paper, paper_text, n, len(there) < len(seeds)))
    names = [table.name, *place]
    command = "fedup bench paper --force " + " ".join(f"--only {name}" for name in names)
    mark = " †" if block and block.failed_attacks else ""
    return Line((*place, part.name), column, tuple(cells), _words(table, column, cells), command, mark)


def _as_printed(value: float, column: Column) -> str:
    """The paper's figure with its own digits, two at least."""
    if column.style not in ("share", "number"):
        return show_value(value, column)
    whole, _, digits = f"{value:.4f}".rstrip("0").partition(".")
    return f"{whole}.{digits:0<2}"


def _text(row: Row | None, column: Column) -> tuple[str, float | None]:
    """What a cell says, and the figure that may be compared."""
    if row is None or not row.results:
        return MISSING, None
    if figure := row.figure(column.key):
        return show_value(figure.mean, column), figure.mean
    if not row.supported:
        return "–", None
    if row.failures and not row.seeds:
        return "failed", None
    if row.never(column.key):
        return "never", None
    if shared := row.uncounted(column.key):
        return f"{show_value(shared.mean, column)} {SHARED}", None
    return (NO_TIME if column.timed else "–"), None


def _count(row: Row | None, column: Column, wanted: int) -> str:
    figure = row.figure(column.key) if row else None
    if figure is None:
        return ""
    _, _, deviation = show_value(figure.mean, column, figure.std).partition(" ± ")
    spread = f"± {deviation}, " if deviation else ""
    return spread + (f"n = {figure.n}" if figure.n >= wanted or column.timed else f"n = {figure.n} of {wanted}")


def _words(table: PaperTable, column: Column, cells: Sequence[GridCell]) -> str:
    """How our figures differ from the paper's and from Retrain's."""
    titles = list(table.about.columns.values())
    both = [(title, cell) for title, cell in zip(titles, cells, strict=True) if None not in (cell.value, cell.paper)]
    sentences = [_beside_paper(both, column)] if both else []
    by_method = dict(zip(table.about.columns, cells, strict=True))
    reference = by_method.get(REFERENCE)
    ours = next((by_method[name] for name in _OURS if name in by_method), None)
    if ours and ours.value is not None:
        others = ((ours.paper, "the paper's"), (reference.value if reference else None, "Retrain's here"))
        beside = [f"{_apart(ours.value, other, column)} {whose}" for other, whose in others if other is not None]
        sentences.append(f"FedUP: {', '.join(beside)}." if beside else "")
    return " ".join(sentence for sentence in sentences if sentence)


def _beside_paper(both: Sequence[tuple[str, GridCell]], column: Column) -> str:
    """The largest difference to what the paper prints."""

    def distance(pair: tuple[str, GridCell]) -> float:
        ours, paper = pair[1].value or 0.0, pair[1].paper or 0.0
        if column.style == "share":
            return abs(ours - paper)
        return max(ours, paper) / max(min(ours, paper), 1e-9)

    title, cell = max(both, key=distance)
    count = f"in all {len(both)} columns" if len(both) > 1 else ""
    if column.style == "share" and distance((title, cell)) <= _CLOSE:
        return f"Within one point of the paper's figures {count}".rstrip() + "."
    apart = _apart(cell.value or 0.0, cell.paper or 0.0, column)
    return f"{'Farthest off: ' if len(both) > 1 else ''}{title}, {apart} the paper's."


def _apart(value: float, other: float, column: Column) -> str:
    """As "0.8 points above", "3.1 ×", "1/40 of": what it is of comes after."""
    if column.style == "share":
        points = 100 * abs(value - other)
        return "as high as" if points < 0.05 else f"{points:.1f} points {'above' if value > other else 'below'}"
    if other <= 0:
        return "beside"
    ratio = value / other
    if ratio < 0.1:
        return f"1/{other / value:,.0f} of" if value else "none beside"
    return "as much as" if f"{ratio:.2g}" == "1" else f"{ratio:.3g} ×"
