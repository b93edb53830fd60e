"""Requests as they are written: options of a command, or rows of a CSV file."""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import typer

from fedup.cli._names import NUMBER, NUMBERS, Names, parse_numbers
from fedup.errors import RequestError
from fedup.request import Forget, union

_COLUMNS = ("reference", "client", "class", "sample", "subject", "reason")
_NO_NAMES = Names()


def from_options(
    clients: list[str], classes: list[str], samples: list[str], subjects: list[str], reason: str, names: Names
) -> list[Forget]:
    """One request for all that the options name; none when they name nothing."""
    parts = [Forget.clients([names.client(text) for text in clients])] if clients else []
    parts += [Forget.classes([names.label(text) for text in classes])] if classes else []
    parts += [_samples_option(text, names) for text in samples]
    parts += [names.persons(subjects)] if subjects else []
    return [replace(union(parts), reason=cast(Any, reason))] if parts else []  # which is checked there


def _samples_option(text: str, names: Names) -> Forget:
    known = max((own for own in names.clients if text.startswith(f"{own}:")), key=len, default=text.partition(":")[0])
    client, colon, rows = known, text[len(known) : len(known) + 1], text[len(known) + 1 :]  # a name may hold colons
    named = NUMBER.fullmatch(client.strip()) or names.clients
    fits = NUMBERS.fullmatch(rows.strip()) or (rows.strip() and names.row_ids() is not None)
    if not colon or not named or not fits:
        raise typer.BadParameter(f"samples are given as CLIENT:IDS, as in 3:17,42,50-60; found {text!r}.")
    return Forget.samples({names.client(client): names.rows(rows)})


def from_csv(path: Path, reason: str = "withdrawal", names: Names = _NO_NAMES) -> list[tuple[Forget, str | None]]:
    """Requests of a file with the columns reference, client, class, sample and subject; rows with one reference are one
    request.

    A row names clients, or classes, or samples of a client (`17 42 50-60`), or one person. A column `reason` overrides
    the one given.
    """
    by_reference: dict[str, list[Forget]] = {}
    for line, row in _rows(path):
        try:
            part = replace(_row(row, names), reason=cast(Any, row["reason"] or reason))
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
    if wrong or not {"client", "class", "sample", "subject"} & set(found):
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


def _row(row: dict[str, str], names: Names) -> Forget:
    if row["subject"]:
        if row["client"] or row["class"] or row["sample"]:
            raise RequestError("a row that names a person names no client, class or sample: give them a row each.")
        return names.persons([row["subject"]])
    client, label = _several(row["client"], "client", names), _several(row["class"], "class", names)
    sample = names.rows(row["sample"]) if row["sample"] else []
    if sample and (len(client) != 1 or label):
        raise RequestError("samples are named with the one client that holds them, and no class.")
    if sample:
        return Forget.samples({client[0]: sample})
    if bool(client) == bool(label):
        raise RequestError("a row names a client, or a class, or samples of a client, or a person.")
    return Forget.clients(client) if client else Forget.classes(label)


def _several(text: str, kind: str, names: Names) -> list[int]:
    """Clients or classes of a cell: one name, names with commas or semicolons between them, or numbers and ranges."""
    known, number = (names.clients, names.client) if kind == "client" else (names.classes, names.label)
    if not text or text in known:
        return [number(text)] if text else []
    if NUMBERS.fullmatch(text):
        return [number(str(own)) for own in parse_numbers(text)]
    if not known:
        raise RequestError(f"{kind} must hold whole numbers; found {text!r}.")
    return [number(part) for part in re.split(r"[,;]", text)]
