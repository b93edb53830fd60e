"""What the columns of a table hold: one pass over the file, in memory that does not grow with it."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedup.errors import DataError
from fedup.tasks.datasets._table_source import TableSource, Values, as_numbers, as_texts
from fedup.tasks.file_options import FileOptions

Use = Literal["label", "truth", "value", "clients", "subject", "id", "number", "category", "ignore"]

MOST_CATEGORIES = 50  # of a column of texts, unless it is chosen as a category
_MOST_CHOSEN = 1000
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,[0-9]+")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}([.,' ][0-9]{3})+([.,][0-9]+)?")
_WHOLE = re.compile(r"-?[0-9]+\.0+")
MOST_VALUES = 20_000  # classes or clients
_TRUTH = {"1": True, "0": False, "true": True, "false": False, "yes": True, "no": False}


@dataclass
class ColumnScan:
    """What was seen of one column."""

    name: str
    chosen: str | None  # its role, or the kind that the user chose
    rows: int = 0
    missing: int = 0
    numbers: int = 0
    texts: int = 0
    first_text: tuple[int, str] | None = None  # row and value
    first_missing: int | None = None
    values: Counter[str] = field(default_factory=Counter)
    counts_rows: bool = True  # whole numbers, each one more than the one before
    lowest: float = np.inf
    highest: float = -np.inf
    _last: float | None = None
    _as_text: bool = False

    def add(self, values: Values) -> None:
        """Take in a block."""
        if self.chosen in ("ignore", "subject", "id"):  # looked at in the second pass, if at all
            self.rows += len(values)
            return
        if self.chosen in ("label", "truth", "clients", "category") or self._as_text:
            self._add_texts(as_texts(values))
        else:
            self._add_numbers(values)
        self.rows += len(values)

    def _add_texts(self, texts: list[str]) -> None:
        if len(self.values) <= MOST_VALUES:
            self.values.update(texts)
        empty = texts.count("")
        if empty and self.first_missing is None:
            self.first_missing = self.rows + texts.index("")
        self.missing += empty
        self.texts += len(texts) - empty

    def _add_numbers(self, values: Values) -> None:
        numbers, odd = as_numbers(values)
        if odd and self.chosen is None and self.rows == 0 and len(odd) > len(values) / 2:
            self._as_text = True
            self._add_texts(as_texts(values))
            return
        if odd and self.first_text is None:
            self.first_text = self.rows + odd[0], str(values[odd[0]])
        present = ~np.isnan(numbers)
        empty = int(len(numbers) - present.sum() - len(odd))
        if empty and self.first_missing is None:
            absent = np.flatnonzero(~present)
            self.first_missing = self.rows + int(next(place for place in absent if place not in set(odd)))
        self.missing += empty
        self.texts += len(odd)
        self.numbers += int(present.sum())
        if present.any():
            self.lowest = min(self.lowest, float(numbers[present].min()))
            self.highest = max(self.highest, float(numbers[present].max()))
        if self.counts_rows:
            run = numbers if self._last is None else np.concatenate([[self._last], numbers])
            self.counts_rows = bool((np.diff(run) == 1).all() and present.all() and run[0] == round(run[0]))
            self._last = float(numbers[-1])


@dataclass(frozen=True)
class Column:
    """How a column is used, and why it is not."""

    name: str
    use: Use
    values: tuple[str, ...] = ()  # of a category, in order
    missing: int = 0
    reason: str = ""
    problem: str = ""


def scan(source: TableSource, options: FileOptions, roles: dict[str, str]) -> tuple[int, dict[str, ColumnScan]]:
    """The number of rows, and what each column holds; `roles` maps columns that are no input to their use."""
    known, kinds = source.columns, options.kinds
    for name, role in {**roles, **dict.fromkeys(kinds, "column")}.items():
        if name not in known:
            shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
            raise DataError(f"{source.path} has no column {name!r} ({role}); it has {shown}.")
    for name in set(roles) & set(kinds):
        raise DataError(f"The column {name!r} is no input: choose no kind for it.")
    scans = {name: ColumnScan(name, roles.get(name) or kinds.get(name)) for name in known}
    rows = 0
    for block in source.blocks(known):
        rows += len(next(iter(block.values())))
        for name, values in block.items():
            scans[name].add(values)
    if rows == 0:
        raise DataError(f"{source.path} has no rows.")
    return rows, scans


def decide(seen: ColumnScan, source: TableSource) -> Column:
    """What a column is used as."""
    name, kind = seen.name, seen.chosen
    if kind in ("label", "clients", "subject", "id"):
        return Column(name, kind, missing=seen.missing)  # type: ignore[arg-type]
    if kind == "truth":
        odd_texts = [text for text in seen.values if text and truth_of(text) is None]
        problem = (
            f"label {name!r} is yes or no (1 or 0, true or false); found {odd_texts[0][:40]!r}" if odd_texts else ""
        )
        return Column(name, "truth", missing=seen.missing, problem=problem)
    if kind == "value":
        odd = f"label {name!r} holds texts ({seen.texts:,}), and values are numbers" if seen.texts else ""
        return Column(name, "value", missing=seen.missing, problem=odd)
    if kind == "ignore":
        return Column(name, "ignore", reason="as chosen")
    if seen.numbers + seen.texts == 0 and kind is None:
        return Column(name, "ignore", reason="no value in any row")
    if kind == "category" or (kind is None and seen.texts and not seen.numbers):
        return _category(seen)
    if seen.texts:
        row, text = seen.first_text or (0, "")
        problem = (
            f"column {name!r} mixes numbers ({seen.numbers:,}) and texts ({seen.texts:,}; first {text.strip()[:40]!r}, "
            f"{source.where(row)}): mend it, or pass --column {name}=category or {name}=ignore"
        )
        return Column(name, "number", missing=seen.missing, problem=problem)
    if kind is None and seen.counts_rows and seen.rows > 1:
        return Column(name, "ignore", reason=f"it numbers the rows; --column {name}=number uses it")
    if kind is None and seen.lowest == seen.highest and not seen.missing:
        return Column(name, "ignore", reason="the same number in every row")
    return Column(name, "number", missing=seen.missing)


def _category(seen: ColumnScan) -> Column:
    name, found = seen.name, len(seen.values) - ("" in seen.values)
    values = in_order(value for value in seen.values if value)
    marks = {"decimal commas": _DECIMAL_COMMA, "marks of thousands": _THOUSANDS} if seen.chosen is None else {}
    for mark, pattern in marks.items():
        marked = [value for value in values[:20] if pattern.fullmatch(value)]
        if 2 * len(marked) > len(values[:20]):
            problem = f"column {name!r} has {mark}, as in {marked[0]!r}: write all its numbers as 1234.5"
            return Column(name, "number", problem=problem)
    if seen.chosen is None and found > MOST_CATEGORIES:
        reason = f"{_many(found)} different texts; --column {name}=category uses it"
        return Column(name, "ignore", reason=reason)
    if seen.chosen is None and found == 1 and not seen.missing:
        return Column(name, "ignore", reason="the same text in every row")
    problem = ""
    if found > _MOST_CHOSEN:
        problem = f"column {name!r} has {_many(found)} different values, more than {_MOST_CHOSEN:,} categories"
    return Column(name, "category", values if not problem else (), missing=seen.missing, problem=problem)


def _many(found: int) -> str:
    return f"more than {MOST_VALUES:,}" if found > MOST_VALUES else f"{found:,}"


def in_order(values: Iterable[str]) -> tuple[str, ...]:
    """Different values in order: by number where all are numbers, else by the alphabet."""
    texts = sorted(set(map(plain, values)))
    try:
        return tuple(sorted(texts, key=float))
    except ValueError:
        return tuple(texts)


def plain(text: str) -> str:
    """The text; a whole number without its decimals, since files write 1 and 1.0 for the same."""
    return text.partition(".")[0] if _WHOLE.fullmatch(text) else text


def truth_of(text: str) -> bool | None:
    """What a column of a label says of a row; None if that is neither yes nor no.

    >>> truth_of("Yes"), truth_of("0.0"), truth_of("maybe")
    (True, False, None)
    """
    return _TRUTH.get(plain(text).lower())


def codes_of(texts: Sequence[str], values: Sequence[str]) -> np.ndarray:
    """The place of each text among the values; -1 where it is missing, -2 where it is unknown."""
    places = {value: place for place, value in enumerate(values)} | {"": -1}
    found = [places.get(text, -3) for text in texts]
    if -3 in found:
        found = [
            places.get(plain(text), -2) if place == -3 else place for text, place in zip(texts, found, strict=True)
        ]
    return np.array(found, dtype=np.int64)
