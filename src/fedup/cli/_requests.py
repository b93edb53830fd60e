"""Requests as they are written: options of a command, or rows of a CSV file."""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import typer

from fedup.errors import RequestError
from fedup.request import Forget, union

_COLUMNS = ("reference", "client", "class", "sample", "reason")
_NUMBERS = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?([,; ]+[0-9]{1,18}(-[0-9]{1,18})?)*")
_MOST = 10_000_000  # a typing error in a range must not fill the memory


def from_options(
    clients: Sequence[int], classes: Sequence[int], samples: Sequence[str], reason: str = "withdrawal"
) -> list[Forget]:
    """One request for all that the options name; none when they name nothing."""
    parts = [Forget.clients(clients)] if clients else []
    parts += [Forget.classes(classes)] if classes else []
    parts += [_samples_option(text) for text in samples]
    return [replace(union(parts), reason=cast(Any, reason))] if parts else []  # which is checked there


def _samples_option(text: str) -> Forget:
    client, colon, numbers = text.partition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,18}", client.strip()) or not _NUMBERS.fullmatch(numbers.strip()):
        raise typer.BadParameter(f"samples are given as CLIENT:IDS, as in 3:17,42,50-60; found {text!r}.")
    return Forget.samples({int(client): parse_numbers(numbers)})


def parse_numbers(text: str) -> list[int]:
    """Whole numbers and ranges.

    >>> parse_numbers("17, 42, 50-52")
    [17, 42, 50, 51, 52]
    """
    numbers: list[int] = []
    for part in re.split(r"[,; ]+", text.strip()):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise RequestError(f"A range runs upwards, as in 50-60; found {part!r}.")
        if int(last or first) - int(first) + len(numbers) >= _MOST:
            raise RequestError(f"At most {_MOST:,} ids are named at once; found {part!r}.")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def from_csv(path: Path, reason: str = "withdrawal") -> list[tuple[Forget, str | None]]:
    """Requests of a file with the columns reference, client, class and sample; rows with one reference are one request.

    A row names a client, or a class, or samples of a client (`17 42 50-60`). A column `reason` overrides the one given.
    """
    by_reference: dict[str, list[Forget]] = {}
    for line, row in _rows(path):
        try:
            part = replace(_row(row), reason=cast(Any, row["reason"] or reason))
        except RequestError as error:
            raise RequestError(f"Line {line} of {path}: {error} Nothing was changed.") from error
        reference = row["reference"] or f"\0{line}"  # a row without one is a request of its own
        by_reference.setdefault(reference, []).append(part)
    if not by_reference:
        raise RequestError(f"{path} names no request: it has a head and no rows below it.")
    return [(union(parts), None if name.startswith("\0") else name) for name, parts in by_reference.items()]


def _rows(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The file {path} cannot be read: {error}.") from error
    reader = csv.DictReader(text.splitlines())
    found = [name.strip().lower() for name in reader.fieldnames or []]
    wrong = len(set(found)) != len(found) or not set(found) <= set(_COLUMNS)
    if wrong or not {"client", "class", "sample"} & set(found):
        raise RequestError(
            f"{path} must begin with a line that names its columns, each once, out of {', '.join(_COLUMNS)}; "
            f"found {', '.join(found) or 'nothing'}."
        )
    reader.fieldnames = found
    for row in reader:
        values = {name: (row.get(name) or "").strip() for name in _COLUMNS}
        if None in row:
            raise RequestError(f"Line {reader.line_num} of {path} has more values than columns. Nothing was changed.")
        if any(values.values()):
            yield reader.line_num, values


def _row(row: dict[str, str]) -> Forget:
    names = ("client", "class", "sample")
    for name in names:
        if row[name] and not _NUMBERS.fullmatch(row[name]):
            raise RequestError(f"{name} must hold whole numbers; found {row[name]!r}.")
    client, label, sample = (parse_numbers(row[name]) if row[name] else [] for name in names)
    if sample and (len(client) != 1 or label):
        raise RequestError("samples are named with the one client that holds them, and no class.")
    if sample:
        return Forget.samples({client[0]: sample})
    if bool(client) == bool(label):
        raise RequestError("a row names a client, or a class, or samples of a client.")
    return Forget.clients(client) if client else Forget.classes(label)
