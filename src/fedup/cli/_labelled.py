"""Rows with labels from a file of the user's own, for `fedup evaluate --data`."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fedup.cli._session import Session
from fedup.cli._text import accuracy_table
from fedup.errors import DataError, MissingDataError, SettingError
from fedup.run.in_words import STATES
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.tasks.datasets import Images, Tables, inputs_from
from fedup.tasks.datasets._own_images import ENDINGS, class_folders
from fedup.tasks.datasets._own_table import read_rows
from fedup.tasks.datasets._table_source import table_source
from fedup.tasks.evaluation import accuracy, accuracy_per_class


def evaluate_file(session: Session, path: Path, state: State, plugged: PluggedModel) -> dict[str, Any]:
    """Accuracies on the rows of a file: of the original model, with the filter, and restored."""
    names = tuple(state.about["class_names"])
    x, y = (own.to(session.device) for own in _rows(path, state, names))
    measured = {"original": _measure(plugged.base, x, y, len(names))}
    if state.filter is not None:
        measured["forgotten"] = _measure(plugged, x, y, len(names))
        with plugged.restored():
            measured["restored"] = _measure(plugged, x, y, len(names))
    return {
        "file": str(path),
        "rows": len(y),
        "filter": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        **measured,
    }


def _measure(model: Any, x: Tensor, y: Tensor, classes: int) -> dict[str, Any]:
    by_class = accuracy_per_class(model, x, y, classes) if y.ndim == 1 else []  # values have no classes
    return {
        "accuracy": accuracy(model, x, y),
        "per_class": [None if value != value else value for value in by_class],
    }


def _rows(path: Path, state: State, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    inputs = inputs_from(state.about["input"])
    if isinstance(inputs, Tables):
        role = "value" if state.about.get("targets") == "values" else "label"
        rows = read_rows(table_source(path), inputs, {inputs.label: role}, names, ())
        return inputs.scale(torch.from_numpy(rows.x)), torch.from_numpy(rows.y)
    if isinstance(inputs, Images):
        return _images(path, inputs, names)
    raise SettingError("`evaluate --data` takes tables and folders of images; this model takes texts.")


def _images(path: Path, inputs: Images, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    folders = class_folders(path)
    if not folders:
        raise MissingDataError(f"There is no folder {path} with a folder of images for each class.")
    pixels, labels = [], []
    for folder in folders:
        if folder.name not in names:
            raise DataError(f"{folder}: the label {folder.name!r} was not there in training ({', '.join(names[:8])}).")
        for file in sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in ENDINGS):
            try:
                pixels.append(inputs.read(file.read_bytes(), resize=True))
            except DataError as error:
                raise DataError(f"{file}: {error}") from error
            labels.append(names.index(folder.name))
    return inputs.prepare(pixels), torch.tensor(labels)


def print_measured(console: Console, result: dict[str, Any], class_names: list[str]) -> None:
    """One table, with a column for each class unless there are many."""
    in_force = f"Filter {result['filter']} for {', '.join(result['in_force'])}"
    console.print(in_force if result["filter"] else "No request is in force: the original model.")
    classes = result["original"]["per_class"]
    shown = class_names[: len(classes)] if len(class_names) <= 12 else []
    rows = {
        name: [result[state]["accuracy"], *result[state]["per_class"][: len(shown)]]
        for state, name in STATES.items()
        if state in result
    }
    console.print(
        accuracy_table(
            f"{result['rows']:,} rows of {result['file']}", ["accuracy" if classes else "score", *shown], rows
        )
    )
