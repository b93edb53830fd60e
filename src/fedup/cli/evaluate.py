"""`fedup evaluate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._progress import progress_bars, wide_console
from fedup.cli._text import accuracy_table
from fedup.errors import RequestError
from fedup.run.in_words import STATES
from fedup.target_words import OUTPUT, SCORE, targets_of

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.run.state import State
    from fedup.serving.plugged import PluggedModel


def evaluate(
    run: options.RunOption = options.DEFAULT_RUN,
    retrain: Annotated[
        bool,
        typer.Option("--retrain", help="Also train anew without the forgotten data, and keep the figures as evidence."),
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Measure on this file, or folder of images, instead: rows with their labels.")
    ] = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the model with and without its filter, on held-out and on official test data.

    Examples:
    [bold]fedup evaluate --run runs/mnist[/]
    [bold]fedup evaluate --retrain[/]
    [bold]fedup evaluate --data checked_patients.csv[/]
    """
    from fedup.cli._session import Session
    from fedup.tasks.evaluation import FederationJudge, accuracy

    session = Session(run, device=device)
    if session.run.read().is_exact:
        from fedup.cli._exact import evaluate_exactly, print_evaluated

        if retrain:
            raise RequestError("The head is the retrained one: `fedup verify --relearn` has clients add up anew.")
        if data is not None:
            from fedup.cli._labelled import evaluate_head_on_file, print_measured

            result, about = evaluate_head_on_file(session, data), session.run.read().about
            options.show(result, as_json, lambda result: print_measured(wide_console(), result, about))
            return
        options.show(evaluate_exactly(session), as_json, print_evaluated)
        return
    state, plugged = session.served()
    if data is not None:
        if retrain:
            raise typer.BadParameter("--retrain measures on the federation's own rows: leave out --data.")
        _on_file(session, data, state, plugged, as_json)
        return
    dataset = session.dataset
    test = dataset.test_x.to(session.device), dataset.test_y.to(session.device)
    judge, on_test = FederationJudge(session.federation), {"original": accuracy(plugged.base, *test)}
    if state.filter is not None:
        on_test["forgotten"] = accuracy(plugged, *test)
        with plugged.restored():
            on_test["restored"] = accuracy(plugged, *test)
    result = {
        "filter": state.filter.id if state.filter else None,
        "in_force": [request.id for request in state.active],
        "test": on_test,
        **(judge(plugged, plugged.requests) if state.filter else {"original": judge.alone(plugged.base, ())}),
    }
    if retrain:
        result["retrained"] = _retrain(session, state, wait)
    options.show(result, as_json, lambda result: _print(result, state.about))


def _on_file(session: "Session", path: Path, state: "State", plugged: "PluggedModel", as_json: bool) -> None:
    from fedup.cli._labelled import evaluate_file, print_measured

    result = evaluate_file(session, path, state, plugged)
    options.show(result, as_json, lambda result: print_measured(wide_console(), result, state.about))


def _retrain(session: "Session", state: "State", wait_s: float) -> dict[str, Any]:
    """Train anew from the same start on what is retained; put on record for evidence."""
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
            rounds=state.rounds,
            observers=[RoundsShown(show, "Retraining without the forgotten data", state.rounds)],
        )
    figures = FederationJudge(session.federation).alone(trained.model, state.forgets) | {"time_s": trained.time_s}
    with session.writing("evaluate", wait_s) as writer:
        writer.commit("evaluated", {"requests": [request.id for request in state.active], "retrained": figures})
    return figures


def _print(result: dict[str, Any], about: Mapping[str, Any]) -> None:
    console, class_names, targets = wide_console(), list(about["class_names"]), targets_of(about)
    in_force = f"Filter {result['filter']} for {', '.join(result['in_force'])}"
    console.print(in_force if result["filter"] else "No request is in force: the original model.")
    rows, by_class = {}, {}
    more: dict[str, dict[str, Any]] = {"f1": {}, "rmse": {}}
    for state, name in {**STATES, "retrained": "Retrain"}.items():
        if own := result.get(state):
            heldout, test = own["heldout"], result["test"].get(state)
            rows[name] = [heldout["retain"], heldout["forget"], own["train"]["forget"], test]
            by_class[name] = own["per_class"]
            for measure, found in more.items():
                found |= {name: own[measure]} if measure in own else {}
    columns = ["held-out, retained", "held-out, forgotten", "training, forgotten", "official test set"]
    console.print(accuracy_table(SCORE[targets], columns, rows))
    if len(class_names) <= 12:
        console.print(accuracy_table(f"held-out, by {OUTPUT[targets]}", class_names, by_class))
        for measure, title in {"f1": "held-out, F1", "rmse": "held-out, RMSE"}.items():
            if more[measure]:
                console.print(accuracy_table(title, class_names, more[measure]))
