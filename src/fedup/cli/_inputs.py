"""What `fedup predict` reads: image files, text files, tables, Parquet files, standard input."""

import io
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from fedup.errors import DataError, FedUPWarning
from fedup.tasks.datasets import Images, Tables, Texts
from fedup.tasks.datasets._parquet import read_column
from fedup.tasks.datasets._table_source import as_texts, table_source

_PARQUET = b"PAR1"
_ENDINGS = {"image": {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}, "text": {".txt"}}
_ENDINGS["table"] = {".csv", ".tsv", ".parquet", ".npz"}

Named = Iterator[tuple[str, Any]]  # an input's name, and its content


@dataclass(frozen=True)
class InputReader:
    """Reads what a model takes; `column` is that of Parquet files, by default named as the kind of inputs is."""

    inputs: Images | Texts | Tables
    column: str | None = None
    resize: bool = False

    def read(self, paths: Iterable[str]) -> Named:
        """Names and contents, one at a time, in the order given; folders give their files by name."""
        for text in paths:
            if text == "-":
                yield from self._read_bytes("Standard input", sys.stdin.buffer.read(), "-")
                continue
            files = [path := Path(text)]
            if path.is_dir():
                files = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in _ENDINGS[self.inputs.kind])
            if not files:
                raise DataError(f"The folder {path} holds no {self.inputs.kind} file.")
            for file in files:
                yield from self._read_file(file)

    def _read_file(self, path: Path) -> Named:
        if isinstance(self.inputs, Tables):
            yield from read_table(self.inputs, path, str(path))
            return
        try:
            with path.open("rb") as file:
                is_parquet = file.read(len(_PARQUET)) == _PARQUET
            if is_parquet:
                yield from self._read_parquet(path, str(path))
            else:
                yield from self._read_bytes(str(path), path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise DataError(f"There is no file {path}.") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error

    def _read_bytes(self, source: str, data: bytes, name: str) -> Named:
        if isinstance(self.inputs, Tables):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "input.parquet" if data.startswith(_PARQUET) else "input.csv")
                path.write_bytes(data)
                yield from read_table(self.inputs, path, name)
        elif data.startswith(_PARQUET):
            yield from self._read_parquet(io.BytesIO(data), name)
        elif not data:
            raise DataError(f"{source} is empty.")
        elif self.inputs.kind == "image":
            yield name, self._decode(source, data)
        else:  # a text on each line
            lines = str(self._decode(source, data)).splitlines()
            yield from ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())

    def _read_parquet(self, file: Any, name: str) -> Named:
        kind = self.inputs.kind
        column, wanted = self.column or kind, bytes if kind == "image" else str
        values = (value for batch in read_column(file, column, name) for value in batch)
        for row, value in enumerate(values):
            place = f"{name}:{row}"
            if not isinstance(value, wanted):
                raise DataError(f"{place}: the column {column!r} holds no {kind} there.")
            yield place, self._decode(place, value) if isinstance(value, bytes) else value

    def _decode(self, source: str, data: bytes) -> Any:
        assert not isinstance(self.inputs, Tables)
        try:
            return self.inputs.read(data, resize=self.resize)
        except DataError as error:
            raise DataError(f"{source}: {error}") from error


@dataclass(frozen=True)
class PreparedRows:
    """Reads rows as a server app's model takes them, from NumPy files: only the app knows how they are made of raw
    inputs."""

    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype

    @property
    def inputs(self) -> "PreparedRows":
        """Itself: rows are prepared already."""
        return self

    def read(self, paths: Iterable[str]) -> Named:
        """Rows with their names, one at a time: of a .npy file, or of `x` in a .npz file."""
        for path in paths:
            rows = self._array(path)
            if rows.shape[1:] != self.shape:
                raise DataError(
                    f"{path} holds an array of shape {tuple(rows.shape)}, and the model of this folder takes rows of "
                    f"shape {self.shape}: (rows, {', '.join(map(str, self.shape))}) is wanted."
                )
            yield from ((f"{path}:{place}", row) for place, row in enumerate(rows))

    def prepare(self, raw: Iterable[Any]) -> torch.Tensor:
        """A batch of rows."""
        return torch.stack(list(raw))

    def _array(self, path: str) -> torch.Tensor:
        wanted = "The model of a server app takes rows as the app prepares them, in a .npy file or as x in a .npz file"
        if Path(path).suffix not in (".npy", ".npz"):
            raise DataError(f"{wanted}; found {path}.")
        try:
            loaded = np.load(path, allow_pickle=False)
            rows = loaded if isinstance(loaded, np.ndarray) else loaded["x"]  # whatever the file's name says
            given = torch.from_numpy(rows)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise DataError(f"{path} cannot be read ({error}). {wanted}.") from error
        return self._converted(given, path)

    def _converted(self, given: torch.Tensor, path: str) -> torch.Tensor:
        """Rows of the model's type; raises if that changes more than the rounding of floats."""
        if self.dtype.is_floating_point and torch.can_cast(given.dtype, self.dtype):
            return given.to(self.dtype)
        converted = given.to(self.dtype) if not given.is_complex() else None
        if converted is None or not np.array_equal(converted.numpy().astype(given.numpy().dtype), given.numpy()):
            raise DataError(
                f"{path} holds rows of type {given.dtype}, and the model of this folder takes {self.dtype}: some "
                "values would change. Save the rows as the app prepares them."
            )
        return converted


def read_table(inputs: Tables, path: Path, name: str) -> Named:
    """Rows of a table by their id, or by their number where the file has no ids; columns are found by name."""
    source = table_source(path)
    lacking = [column for column in inputs.names if column not in source.columns]
    if lacking:
        shown = ", ".join(lacking[:8]) + (", …" if len(lacking) > 8 else "")
        raise DataError(f"{name} has no column {shown}: the model was trained with {len(inputs.names)} columns.")
    id_column = inputs.id_column if inputs.id_column in source.columns else None
    unknown: Counter[str] = Counter()
    row = 0
    for block in source.blocks([*inputs.names, *([id_column] if id_column else [])]):
        encoded = inputs.encode(block, source, row)
        unknown.update(inputs.unknown(block))
        ids = as_texts(block[id_column]) if id_column else [""] * len(encoded)
        yield from ((own or f"{name}:{row + place}", encoded[place - 1]) for place, own in enumerate(ids, start=1))
        row += len(encoded)
    if row == 0:
        raise DataError(f"{name} has no rows.")
    if unknown:
        counts = ", ".join(f"{column} ({count:,})" for column, count in unknown.items())
        warnings.warn(
            FedUPWarning(f"{name}: values that were not there in training count as none of the known: {counts}."),
            stacklevel=2,
        )
