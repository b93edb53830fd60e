"""Rows with labels from a file of the user's own, for `fedup evaluate --data`."""

from collections.abc import Mapping
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
from fedup.target_words import SCORE, targets_of
from fedup.tasks.datasets import Images, Tables, inputs_from
from fedup.tasks.datasets._own_images import ENDINGS, class_folders
from fedup.tasks.datasets._table_rows import ROLE_OF, read_rows
from fedup.tasks.datasets._table_source import table_source
from fedup.tasks.evaluation import predict
from fedup.tasks.scores import by_output, more_by_output, score


def evaluate_file(session: Session, path: Path, state: State, plugged: PluggedModel) -> dict[str, Any]:
    """Accuracies on the rows of a file: of the original model, with the filter, and restored."""
    names = tuple(state.about["class_names"])
    x, y = (own.to(session.device) for own in _rows(path, state, names))
    measured = {"original": _measure(plugged.base, x, y)}
    if state.filter is not None:
        measured["forgotten"] = _measure(plugged, x, y)
        with plugged.restored():
            measured["restored"] = _measure(plugged, x, y)
    return {
        "file": str(path),
        "rows": len(y),
        "filter": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        **measured,
    }


def evaluate_head_on_file(session: Session, path: Path) -> dict[str, Any]:
    """The same of a head on a public backbone, which takes the place of model and filter."""
    state, model = session.answering()
    x, y = (own.to(session.device) for own in _rows(path, state, tuple(state.about["class_names"])))
    return {
        "file": str(path),
        "rows": len(y),
        "head": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        "served": _measure(model, x, y),
    }


def _measure(model: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    outputs = predict(model, x)
    return {
        "accuracy": score(outputs, y),
        "per_class": by_output(outputs, y, outputs.shape[1]),
        **more_by_output(outputs, y),
    }


def _rows(path: Path, state: State, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    inputs = inputs_from(state.about["input"])
    if isinstance(inputs, Tables):
        targets = targets_of(state.about)
        columns = (inputs.label,) if targets == "classes" else names
        rows = read_rows(table_source(path), inputs, dict.fromkeys(columns, ROLE_OF[targets]), names, ())
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


def print_measured(console: Console, result: dict[str, Any], about: Mapping[str, Any]) -> None:
    """One table, with a column for each class, label or value unless there are many; F1 or RMSE below it."""
    part = f"Head {result['head']}" if "head" in result else f"Filter {result['filter']}"
    in_force = f"{part} for {', '.join(result['in_force'])}."
    console.print(in_force if result["in_force"] else "No request is in force: the original model.")
    targets, names = targets_of(about), list(about["class_names"])
    states = {name: result[state] for state, name in {**STATES, "served": "served"}.items() if state in result}
    shown = names if 1 < len(names) <= 12 else []
    rows = {name: [own["accuracy"], *own["per_class"][: len(shown)]] for name, own in states.items()}
    console.print(f"{result['rows']:,} rows of {result['file']}:", markup=False, soft_wrap=True)
    console.print(accuracy_table(SCORE[targets], ["all", *shown], rows))
    for measure, called in {"f1": "F1", "rmse": "RMSE"}.items():
        if len(names) <= 12 and all(measure in own for own in states.values()):
            console.print(accuracy_table(called, names, {name: own[measure] for name, own in states.items()}))
