"""Rows of CSV, Parquet and npz files, a block at a time: memory depends on the block, not on the file."""

import csv
import re
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from fedup.errors import DataError, MissingDataError

Values = list[str] | np.ndarray  # texts as they stand in the file; or whole numbers; or numbers, NaN where missing
Block = dict[str, Values]

MISSING = frozenset(("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"))
_BLOCK = 8192  # rows
_LONGEST = 1 << 20  # bytes of a line
_DECIMAL_COMMA = re.compile(r"\s*[+-]?[0-9]+,[0-9]+(?:[eE][+-]?[0-9]+)?\s*")
_BEGINNINGS = {
    b"PK": "it begins as a zip or Excel file: save the sheet as CSV",
    b"PAR1": "it is a Parquet file: name it .parquet",
    b"\x1f\x8b": "it is compressed: unpack it",
    b"\xff\xfe": "it is UTF-16: save it as UTF-8",
    b"\xfe\xff": "it is UTF-16: save it as UTF-8",
}


class CommaTexts(list[str]):
    """Texts that stood between semicolons or tabs: numbers among them may have decimal commas."""


class TableSource(Protocol):
    """Names of the columns, and their values."""

    path: Path

    @property
    def columns(self) -> list[str]: ...

    def blocks(self, names: Sequence[str]) -> Iterator[Block]: ...

    def where(self, row: int) -> str:
        """A row as messages name it."""


def table_source(path: Path) -> TableSource:
    """The reader for a file, by its ending."""
    kinds: dict[str, type[CsvSource | ParquetSource | NpzSource]] = {
        ".csv": CsvSource,
        ".tsv": CsvSource,
        ".parquet": ParquetSource,
        ".npz": NpzSource,
    }
    if path.suffix.lower() not in kinds:
        raise DataError(f"{path}: a table is a .csv, .tsv, .parquet or .npz file.")
    if not path.is_file():
        raise MissingDataError(f"There is no file {path}.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    return kinds[path.suffix.lower()](path)


class CsvSource:
    """A CSV file in UTF-8 whose first line names the columns; commas, semicolons or tabs between values.

    Between semicolons or tabs numbers may have decimal commas, as spreadsheets write them where that is usual.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._delimiter = ","  # until the first line is read

    @cached_property
    def columns(self) -> list[str]:
        """The names in the first line."""
        with self._open() as file:
            names = [name.strip() for name in next(self._reader(file), ([], 0))[0]]
        if not any(names):
            raise DataError(f"{self.path} is empty, or its first line names no column.")
        if names[0] == "" and "unnamed" not in names:  # pandas writes its index so
            names[0] = "unnamed"
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "" in names:
            which = f"{twice[0]!r} is there twice" if twice and twice[0] else f"name {names.index('') + 1} is empty"
            raise DataError(f"The first line of {self.path} must name its columns, each by another name: {which}.")
        if all(_number(name) is not None for name in names):
            raise DataError(f"The first line of {self.path} must name its columns; it holds numbers only.")
        if len(names) == 1:
            raise DataError(f"{self.path} has one column only: put a comma, semicolon or tab between values.")
        return names

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Texts as they stand in the file."""
        width, wanted = len(self.columns), [(self.columns.index(name), name) for name in names]
        before = 0
        with self._open() as file:
            reader = filter(None, (row for row, _ in self._reader(file)))  # without empty lines
            next(reader)
            while rows := list(islice(reader, _BLOCK)):
                odd = next((place for place, row in enumerate(rows) if len(row) != width), None)
                if odd is not None:
                    raise DataError(
                        f"{self.path}, {self.where(before + odd)}: {len(rows[odd])} values, and the first line names "
                        f"{width} columns."
                    )
                before += len(rows)
                columns = list(zip(*rows, strict=True))
                kind = list if self._delimiter == "," else CommaTexts
                yield {name: kind(columns[place]) for place, name in wanted}

    def where(self, row: int) -> str:
        """The line where the row ends; read again, since a value may go over several lines."""
        with self._open() as file:
            lines = (line for values, line in self._reader(file) if values)
            return f"line {next(islice(lines, row + 1, None), '?')}"

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _reader(self, file: BinaryIO) -> Iterator[tuple[list[str], int]]:
        """Values of each row, and the line where it ends."""
        start = file.read(4)
        for beginning, reason in _BEGINNINGS.items():
            if start.startswith(beginning):
                raise DataError(f"{self.path} is no CSV file: {reason}.")
        file.seek(3 if start.startswith(b"\xef\xbb\xbf") else 0)
        lines = self._lines(file)
        head = next(lines, "")
        self._delimiter = max(",;\t", key=head.count)
        reader = csv.reader(_joined(head, lines), delimiter=self._delimiter, skipinitialspace=True, strict=True)
        try:
            for row in reader:
                yield row, reader.line_num
        except csv.Error as error:
            raise DataError(f"{self.path}, line {reader.line_num}: {error}. Is a quotation mark missing?") from error

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        """Lines as text; a line is never longer than memory allows."""
        number = 0
        while line := file.readline(_LONGEST):
            number += 1
            if b"\0" in line:
                raise DataError(f"{self.path} is no text file: line {number} holds a zero byte.")
            if len(line) == _LONGEST:
                raise DataError(f"{self.path}, line {number}: it is longer than a million bytes. Is this a CSV file?")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.path} is not UTF-8 text (line {number}, byte 0x{line[error.start]:02x}): save it as UTF-8."
                ) from error


def _joined(head: str, lines: Iterator[str]) -> Iterator[str]:
    if head:
        yield head
    yield from lines


class ParquetSource:
    """A Parquet file of plain columns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def columns(self) -> list[str]:
        """The names in the schema."""
        from fedup.tasks.datasets._parquet import read_schema

        return [str(name) for name in read_schema(self.path).names]

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Numbers as arrays, all else as texts."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            for batch in pq.ParquetFile(self.path).iter_batches(batch_size=_BLOCK, columns=list(names)):
                yield {name: _from_arrow(batch.column(name)) for name in names}
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{self.path} is damaged, or holds columns that are no table ({reason}).") from error

    def where(self, row: int) -> str:
        """Counted from 1."""
        return f"row {row + 1:,}"


def _from_arrow(column: Any) -> Values:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type) and column.null_count == 0 and column.type != pa.uint64():
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
    if pa.types.is_floating(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        raise ValueError(f"a column of {column.type}")
    return ["" if value is None else str(value) for value in column.to_pylist()]


class NpzSource:
    """Arrays x (rows × columns) and y, and optionally clients, subjects, ids, test_x and test_y."""

    roles = ("y", "clients", "subjects", "ids")

    def __init__(self, path: Path, part: str = "") -> None:
        self.path, self.part = path, part  # part: "" or "test_"

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays that have a meaning here, as many rows in each."""
        wanted = ("x", "y") if self.part else ("x", *self.roles)
        if not zipfile.is_zipfile(self.path):
            raise DataError(f"{self.path} is damaged or no npz file.")
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                found = {name: stored[self.part + name] for name in wanted if self.part + name in stored.files}
                known = sorted(stored.files)
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, SyntaxError) as error:
            raise DataError(f"{self.path} is damaged or no npz file of plain arrays ({error}).") from error
        if "x" not in found or found["x"].ndim != 2 or found["x"].dtype.kind not in "fiub":
            raise DataError(f"{self.path} must hold numbers as x (rows × columns) and labels as y; it holds {known}.")
        odd = [
            name for name, array in found.items() if len(array) != len(found["x"]) or (name != "x" and array.ndim > 1)
        ]
        if odd:
            raise DataError(f"{self.path}: {odd[0]} has the shape {found[odd[0]].shape} and x {found['x'].shape}.")
        return found

    @cached_property
    def has_test(self) -> bool:
        """Whether test rows are in the file, too."""
        with np.load(self.path, allow_pickle=False) as stored:
            return "test_x" in stored.files

    @property
    def columns(self) -> list[str]:
        """x0, x1, …, and the names of the other arrays."""
        return [*(f"x{place}" for place in range(self.arrays["x"].shape[1])), *(n for n in self.arrays if n != "x")]

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Numbers as arrays, texts as lists."""
        x = self.arrays["x"]
        for start in range(0, len(x), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield {
                name: _from_numpy(self.arrays[name][rows] if name in self.arrays else x[rows, int(name[1:])])
                for name in names
            }

    def where(self, row: int) -> str:
        """Its index, as numpy counts."""
        return f"row {row:,} (from 0)"


def _from_numpy(values: np.ndarray) -> Values:
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    if values.dtype.kind == "b":
        return [str(value) for value in values.tolist()]
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values.tolist()]


def as_texts(values: Values) -> list[str]:
    """Values without spaces around them, "" where missing; a whole number has no decimals."""
    if isinstance(values, list):
        stripped = [value.strip() for value in values]
        return ["" if value in MISSING else value for value in stripped]
    if values.dtype.kind == "i":
        return list(map(str, values.tolist()))
    return [
        "" if value != value else f"{value:.0f}" if value.is_integer() else repr(value) for value in values.tolist()
    ]


def as_numbers(values: Values) -> tuple[np.ndarray, list[int]]:
    """Numbers, NaN where missing; and the places of values that are no finite number."""
    if not isinstance(values, list):
        numbers = values.astype(np.float64)
        return numbers, np.flatnonzero(np.isinf(numbers)).tolist()
    try:
        numbers = np.fromiter(map(float, values), np.float64, len(values))
        if np.isfinite(numbers).all() and "_" not in "".join(values):  # Python reads 1_000 as a number
            return numbers, []
    except ValueError:
        values = _with_points(values) if isinstance(values, CommaTexts) else values
    parsed = [np.nan if (text := value.strip()) in MISSING else _number(text) for value in values]
    texts = [place for place, value in enumerate(parsed) if value is None]
    return np.array([np.nan if value is None else value for value in parsed]), texts


def _with_points(values: list[str]) -> list[str]:
    """Decimal points in place of commas; not where values have both, since one of them marks thousands then."""
    if any("." in value and _number(value) is not None for value in values):
        return values
    return [value.replace(",", ".") if _DECIMAL_COMMA.fullmatch(value) else value for value in values]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") and "_" not in text else None
