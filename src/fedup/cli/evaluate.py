"""`fedup evaluate`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli._options import (
    DEFAULT_RUN,
    DEFAULT_WAIT_S,
    DeviceOption,
    JsonOption,
    RunOption,
    ThreadsOption,
    WaitOption,
)

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.run.state import State
    from fedup.serving.plugged import PluggedModel


def evaluate(
    run: RunOption = DEFAULT_RUN,
    retrain: Annotated[
        bool,
        typer.Option("--retrain", help="Also train anew without the forgotten data, and keep the figures as evidence."),
    ] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Measure the model before and under the filter in force, on held-out data and on the official test set.

    Examples: [bold]fedup evaluate --run runs/mnist[/], [bold]fedup evaluate --retrain[/]
    """
    from fedup.cli._session import Session

    session = Session(run, device=device)
    state, plugged = session.served()
    result = _figures(session, state, plugged)
    if retrain:
        result["retrained"] = _retrain(session, state, wait)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(result, list(state.about["class_names"]))


def _figures(session: "Session", state: "State", plugged: "PluggedModel") -> dict[str, Any]:
    from fedup.tasks.evaluation import FederationJudge, accuracy

    data = session.dataset
    test = data.test_x.to(session.device), data.test_y.to(session.device)
    result: dict[str, Any] = {
        "filter": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        "test": {"original": accuracy(plugged.base, *test)},
    }
    judge = FederationJudge(session.federation)
    if state.filter is None:
        return result | {"original": judge.alone(plugged.base, ())}
    result["test"]["forgotten"] = accuracy(plugged, *test)
    with plugged.restored():
        result["test"]["restored"] = accuracy(plugged, *test)
    return result | judge(plugged, plugged.requests)


def _retrain(session: "Session", state: "State", wait_s: float) -> dict[str, Any]:
    """FedAvg anew from the same start on what is retained; on record, so that evidence can show it."""
    from fedup.cli._progress import progress_bars
    from fedup.errors import RequestError
    from fedup.models.views import fingerprint
    from fedup.tasks.evaluation import FederationJudge
    from fedup.tasks.progress import RoundsShown

    recipe = session.recipe
    if not state.active:
        raise RequestError("No request is in force, so retraining would give the same model again.")
    start = session.blank(state)
    if recipe.rounds == 0 or fingerprint(start.cpu()) != state.about["initial"]:
        raise RequestError(
            "The weights that the model started from cannot be made again (they were brought, or another version of "
            "torch draws others), so there is no retraining to compare with."
        )
    with progress_bars(session.console, line_for_each="round") as show:
        trained = recipe.train(
            start.to(session.device),
            session.federation.without(state.left_out),
            observers=[RoundsShown(show, "Retraining without the forgotten data", recipe.rounds)],
        )
    figures = FederationJudge(session.federation).alone(trained.model, state.forgets) | {"time_s": trained.time_s}
    with session.writing("evaluate", wait_s) as writer:
        writer.commit("evaluated", {"requests": [request.id for request in state.active], "retrained": figures})
    return figures


def _print(result: dict[str, Any], class_names: list[str]) -> None:
    from rich.table import Table

    from fedup.cli._progress import wide_console
    from fedup.cli._text import accuracy

    console = wide_console()
    requests = ", ".join(result["in_force"])
    console.print(
        f"Filter {result['filter']} for {requests}"
        if result["filter"]
        else "No request is in force: the original model.",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in (
        "accuracy",
        "held-out, retained",
        "held-out, forgotten",
        "training, forgotten",
        "official test set",
    ):
        table.add_column(column, justify="left" if column == "accuracy" else "right")
    names = (
        ("original", "before"),
        ("forgotten", "with the filter"),
        ("restored", "restored"),
        ("retrained", "Retrain"),
    )
    shown = [(state, name) for state, name in names if state in result]
    for state, name in shown:
        own = result[state]
        values = (own["heldout"]["retain"], own["heldout"]["forget"], own["train"]["forget"], result["test"].get(state))
        table.add_row(name, *map(accuracy, values))
    console.print(table)
    by_class = Table(box=None, pad_edge=False)
    by_class.add_column("held-out, by class")
    for name in class_names:
        by_class.add_column(name, justify="right")
    for state, name in shown:
        by_class.add_row(name, *map(accuracy, result[state]["per_class"]))
    if len(class_names) <= 12:
        console.print(by_class)
