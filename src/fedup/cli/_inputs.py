"""What `fedup predict` reads: image files, text files, Parquet files, standard input."""

import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedup.errors import DataError
from fedup.tasks.datasets import Images, Texts
from fedup.tasks.datasets._parquet import read_column

_PARQUET = b"PAR1"
_ENDINGS = {"image": {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}, "text": {".txt"}}

Named = Iterator[tuple[str, Any]]  # an input's name, and its content


@dataclass(frozen=True)
class InputReader:
    """Reads what a model takes; `column` is that of Parquet files, by default named as the kind of inputs is."""

    inputs: Images | Texts
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
                files = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in _ENDINGS[self._kind])
            if not files:
                raise DataError(f"The folder {path} holds no {self._kind} file.")
            for file in files:
                yield from self._read_file(file)

    @property
    def _kind(self) -> str:
        return self.inputs.kind

    def _read_file(self, path: Path) -> Named:
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
        if data.startswith(_PARQUET):
            yield from self._read_parquet(io.BytesIO(data), name)
        elif not data:
            raise DataError(f"{source} is empty.")
        elif self._kind == "image":
            yield name, self._decode(source, data)
        else:  # a text on each line
            lines = str(self._decode(source, data)).splitlines()
            yield from ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())

    def _read_parquet(self, file: Any, name: str) -> Named:
        column, is_image = self.column or self._kind, self._kind == "image"
        values = (value for batch in read_column(file, column, name) for value in batch)
        for row, value in enumerate(values):
            place = f"{name}:{row}"
            if not isinstance(value, bytes if is_image else str):
                raise DataError(f"{place}: the column {column!r} holds no {self._kind} there.")
            yield place, self._decode(place, value) if isinstance(value, bytes) else value

    def _decode(self, source: str, data: bytes) -> Any:
        try:
            return self.inputs.read(data, resize=self.resize)
        except DataError as error:
            raise DataError(f"{source}: {error}") from error
