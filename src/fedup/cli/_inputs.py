"""What `fedup predict` reads: image files, text files, Parquet files, standard input."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedup.errors import DataError
from fedup.tasks.datasets import Images, Texts

_PARQUET = b"PAR1"
_IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def read_inputs(
    paths: list[str], how: Images | Texts, *, column: str | None, resize: bool
) -> Iterator[tuple[str, Any]]:
    """Names and contents, one at a time, in the order given; folders give their images by name."""
    for text in paths:
        if text == "-":
            yield from _read_bytes("-", sys.stdin.buffer.read(), how, column, resize)
            continue
        path = Path(text)
        if path.is_dir():
            entries = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in _wanted(how))
            if not entries:
                raise DataError(f"The folder {path} holds no {how.kind} file.")
        else:
            entries = [path]
        for entry in entries:
            yield from _read_file(entry, how, column, resize)


def _wanted(how: Images | Texts) -> set[str]:
    return _IMAGE_ENDINGS if how.kind == "image" else {".txt"}


def _read_file(path: Path, how: Images | Texts, column: str | None, resize: bool) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        if is_parquet:
            yield from _read_parquet(path, str(path), how, column, resize)
        else:
            yield from _read_bytes(str(path), path.read_bytes(), how, column, resize)
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _read_bytes(
    name: str, data: bytes, how: Images | Texts, column: str | None, resize: bool
) -> Iterator[tuple[str, Any]]:
    if data.startswith(_PARQUET):
        import io

        yield from _read_parquet(io.BytesIO(data), name, how, column, resize)
    elif not data:
        raise DataError(f"{'Standard input' if name == '-' else name} is empty.")
    elif how.kind == "image":
        yield name, _read_one(name, data, how, resize)
    else:  # a text on each line
        lines = str(_read_one(name, data, how, resize)).splitlines()
        yield from ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())


def _read_parquet(
    source: Any, name: str, how: Images | Texts, column: str | None, resize: bool
) -> Iterator[tuple[str, Any]]:
    from fedup.tasks.datasets._parquet import read_column

    row = 0
    for values in read_column(source, column or how.kind, name):
        for value in values:
            place = f"{name}:{row}"
            if (how.kind == "image" and not isinstance(value, bytes)) or (
                how.kind == "text" and not isinstance(value, str)
            ):
                raise DataError(f"{place}: the column {column or how.kind!r} holds no {how.kind} there.")
            yield place, _read_one(place, value, how, resize) if how.kind == "image" else value
            row += 1


def _read_one(name: str, data: bytes, how: Images | Texts, resize: bool) -> Any:
    try:
        return how.read(data, resize=resize)
    except DataError as error:
        raise DataError(f"{'Standard input' if name == '-' else name}: {error}") from error
