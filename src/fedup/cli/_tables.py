"""Tables of the user's own on the command line: options, and a few lines on what a file holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedup.cli._settings import Settings
from fedup.errors import SettingError
from fedup.tasks.file_options import FileOptions

if TYPE_CHECKING:
    from fedup.tasks.datasets import OwnImages, OwnTable

_INPUTS = {"number": "as numbers", "category": "as categories"}
_SHOWN = 8  # names of classes, clients or columns


def options_from(given: Settings) -> FileOptions | None:
    """The options of a file; None where none was given."""
    return FileOptions(**{**given, "column": tuple(given.get("column", ()))}) if given else None


def public_scaling(name: str, file: FileOptions | None) -> FileOptions | None:
    """The options with a scaling that no row of the data has a say in: exact mode needs one."""
    from fedup.tasks.datasets import OwnImages, own_source

    own = own_source(name, file.with_constants() if file else None)
    if own is None:
        return file
    if isinstance(own, OwnImages):
        return replace(own.options, standardise="none")
    if own.options.standardise == "clients":
        raise SettingError(
            "With --backbone forgetting is exact only if no row had a say in the scaling of numbers: pass "
            "--standardise FILE with public constants, or --standardise none."
        )
    return file


def describe_table(own: "OwnTable") -> dict[str, Any]:
    """What each column is used as, and what is wrong; reads the whole file."""
    columns = own.columns
    uses: dict[str, list[str]] = {}
    for column in columns.values():
        uses.setdefault(column.use, []).append(column.name)
    found: dict[str, Any] = {
        "rows": own.rows,
        "uses": uses,
        "classes": own.counts("label"),
        "labels": own.yes_counts(),
        "values": {name: list(bounds) for name, bounds in own.value_ranges().items()},
        "clients": own.counts("clients"),
        "categories": {name: list(columns[name].values) for name in uses.get("category", ())},
        "missing": {column.name: column.missing for column in columns.values() if column.missing},
        "ignored": {name: columns[name].reason for name in uses.get("ignore", ())},
        "problems": list(own.problems),
    }
    if not found["problems"]:
        found |= _described_rows(own)
    return found


def columns_in_words(name: str, file: FileOptions | None) -> str:
    """One line on what a table's columns were used as; empty for any other data set."""
    from fedup.tasks.datasets import OwnTable, own_source

    own = own_source(name, file)
    if not isinstance(own, OwnTable):
        return ""
    uses: dict[str, list[str]] = {}
    for column in own.columns.values():
        uses.setdefault(column.use, []).append(column.name)
    inputs = [f"{len(uses[use])} {words}" for use, words in _INPUTS.items() if use in uses]
    ignored = f"; ignored: {_listed(uses['ignore'])} (`fedup data check` says why)" if "ignore" in uses else ""
    return f"Columns used as inputs: {' and '.join(inputs)}{ignored}.\n"


def _described_rows(own: "OwnTable") -> dict[str, Any]:
    """What the second pass finds: persons, ids, the rows that are kept apart; or what is wrong with them."""
    from fedup.errors import FedUPError

    try:
        dataset, defaults = own.load(), own.DEFAULTS
    except FedUPError as error:
        return {"problems": [str(error).removeprefix(f"{own.path}: ").rstrip(".")]}
    persons = [subject for subject in dataset.subjects or () if subject]
    return {
        "training_rows": len(dataset.y),
        "test_rows": len(dataset.test_y),
        "width": dataset.x.shape[1],
        "persons": len(set(persons)) if dataset.subjects is not None else None,
        "rows_without_person": len(dataset.y) - len(persons) if dataset.subjects is not None else None,
        "defaults": {"model": defaults.model, "rounds": defaults.rounds, "batch_size": defaults.batch_size},
    }


def describe_images(own: "OwnImages") -> dict[str, Any]:
    """Classes, sizes, and the settings that suit them."""
    dataset, defaults = own.load(), own.DEFAULTS
    counts = Counter(label for split in ("train", "test") for _, label in own.images(split))
    return {
        "rows": len(dataset.y) + len(dataset.test_y),
        "training_rows": len(dataset.y),
        "test_rows": len(dataset.test_y),
        "classes": {name: counts[label] for label, name in enumerate(dataset.class_names)},
        "shape": list(dataset.x.shape[1:]),
        "defaults": {"model": defaults.model, "rounds": defaults.rounds, "batch_size": defaults.batch_size},
        "problems": [],
    }


def print_own(console: Console, found: Mapping[str, Any]) -> None:
    """One line for each use of columns, and what is wrong."""
    size = f"{found['name']}: {found['rows']:,} rows" if "rows" in found else f"{found['name']}:"
    console.print(f"{size}, read in {found['time_s']:.1f} s", markup=False)
    lines = Table(Column(style="dim"), Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for use, text in _lines(found):
        lines.add_row(use, escape(text))
    console.print(lines)
    for problem in found["problems"]:
        console.print(f"[bold red]Wrong:[/] {escape(problem)}.", soft_wrap=True)
    if not found["problems"]:
        settings = found["defaults"]
        console.print(
            f"Nothing is wrong. By default: {settings['model']}, {settings['rounds']} rounds, batches of "
            f"{settings['batch_size']}."
        )


def _lines(found: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    uses = found.get("uses", {})
    lines = []
    if found.get("classes"):
        label = f"{uses['label'][0]}, " if uses else ""
        lines.append(("label", f"{label}{len(found['classes'])} classes: {_counted(found['classes'])}"))
    lines += [
        ("label", f"{name}: yes in {count:,} rows, no in {found['rows'] - count:,}")
        for name, count in found.get("labels", {}).items()
    ]
    lines += [
        ("label", f"{name}, values from {low:g} to {high:g}") for name, (low, high) in found.get("values", {}).items()
    ]
    if found.get("clients"):
        lines.append(("clients", f"{uses['clients'][0]}, {len(found['clients'])}: {_counted(found['clients'])}"))
    if "subject" in uses:
        persons = f": {n:,} persons in the training rows" if (n := found.get("persons")) is not None else ""
        unknown = f", {n:,} rows of nobody" if (n := found.get("rows_without_person")) else ""
        lines.append(("person", f"{uses['subject'][0]}{persons}{unknown}"))
    lines += [("row id", name) for name in uses.get("id", ())]
    if "number" in uses:
        lines.append(("number", f"{len(uses['number'])}: {_listed(uses['number'])}"))
    lines += [
        ("category", f"{name}, {len(values)} values: {_listed(values)}")
        for name, values in found.get("categories", {}).items()
    ]
    lines += [("ignored", f"{name}: {reason}") for name, reason in found.get("ignored", {}).items()]
    if found.get("missing"):
        lines.append(("missing", _counted(found["missing"])))
    if "shape" in found:
        lines.append(("images", "×".join(map(str, found["shape"])) + " (channels, height, width)"))
    if "training_rows" in found:
        lines.append(
            ("rows", f"{found['training_rows']:,} with clients, {found['test_rows']:,} kept apart as test set")
        )
    return lines


def _counted(counts: Mapping[str, int]) -> str:
    return _listed([f"{name} {count:,}" for name, count in counts.items()])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(chain(names[:_SHOWN], ["…"] if len(names) > _SHOWN else []))
