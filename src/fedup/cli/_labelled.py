"""Rows with labels from a file of the user's own, for `fedup evaluate --data`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from fedup.cli._session import Session
from fedup.cli._text import accuracy_table
from fedup.run.in_words import STATES
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.target_words import SCORE, targets_of
from fedup.tasks.evaluation import predict
from fedup.tasks.labelled import labelled_rows
from fedup.tasks.scores import by_output, more_by_output, score


def evaluate_file(session: Session, path: Path, state: State, plugged: PluggedModel) -> dict[str, Any]:
    """Accuracies on the rows of a file: of the original model, with the filter, and restored."""
    rows = labelled_rows(str(path), session.about)
    x, y = rows.x.to(session.device), rows.y.to(session.device)
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
    rows = labelled_rows(str(path), session.about)
    x, y = rows.x.to(session.device), rows.y.to(session.device)
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
