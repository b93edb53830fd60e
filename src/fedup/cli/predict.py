"""`fedup predict`."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli._options import DEFAULT_RUN, DeviceOption, JsonOption, RunOption, ThreadsOption

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.run.state import State
    from fedup.tasks.datasets import Images, Texts

_BATCH = 256


def predict(
    inputs: Annotated[
        list[str], typer.Argument(help="Image, text or Parquet files, folders, or - for standard input.")
    ],
    run: RunOption = DEFAULT_RUN,
    filter_id: Annotated[
        str | None,
        typer.Option("--filter", help="Refuse unless this filter (its first digits) is in force; none: no filter."),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of Parquet files; by default image or text.")] = None,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of another size.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify images or texts under the filter in force; each answer names the filter.

    Text files and standard input hold one text per line. With --json each answer is a line of JSON.

    Examples: [bold]fedup predict digit.png[/], [bold]cat news.txt | fedup predict - --run runs/news --json[/]
    """
    from fedup.cli._session import Session

    session = Session(run, device=device)
    state, answers = _answers(session, inputs, filter_id, column, resize)
    if as_json:
        for answer in answers:
            typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        _print(answers, state)


def _answers(
    session: "Session", inputs: list[str], filter_id: str | None, column: str | None, resize: bool
) -> tuple["State", Iterator[dict[str, Any]]]:
    from fedup.cli._inputs import read_inputs
    from fedup.errors import ArtifactError

    state, plugged = session.served()
    served = state.filter.sha256 if state.filter else "none"
    if filter_id is not None and (not filter_id or not served.startswith(filter_id.lower())):
        raise ArtifactError(
            f"The filter in force is {served[:16]}, and {filter_id!r} was asked for: nothing was answered. "
            "`fedup status` shows what is in force."
        )
    how = _inputs(session.recipe.data, state.about["input"])
    if how.identity() != state.about["input"]:
        raise ArtifactError(
            "Inputs would be read otherwise than at training (another vocabulary or image size): nothing was answered."
        )
    # Without a request in force the original model is what the folder serves; with one, only the filtered view answers.
    model = plugged if state.active else plugged.base
    names = list(state.about["class_names"])
    items = read_inputs(inputs, how, column=column, resize=resize)
    return state, _batches(items, how, model, names, served[:16] if state.filter else None, session.device)


def _inputs(data: str, identity: Mapping[str, Any]) -> "Images | Texts":
    """How inputs are read: the data set's file says it; for Parquet files of one's own the run folder does."""
    from fedup.registry import names
    from fedup.tasks.datasets import input_of, inputs_from

    has_code = data.endswith(".py") or data in names("fedup.tasks.datasets")
    return input_of(data) if has_code else inputs_from(identity)


def _batches(
    items: Iterator[tuple[str, Any]], how: Any, model: Any, names: list[str], filter_id: str | None, device: str
) -> Iterator[dict[str, Any]]:
    from fedup.tasks.evaluation import predict as logits_for

    while batch := list(islice(items, _BATCH)):
        x = how.prepare([raw for _, raw in batch]).to(device)
        shares = logits_for(model, x).softmax(1)
        best = shares.max(1)
        for (name, _), share, label in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
            yield {
                "input": name,
                "class": label,
                "name": names[label],
                "probability": round(share, 6),
                "filter": filter_id,
            }


def _print(answers: Iterator[dict[str, Any]], state: "State") -> None:
    for answer in answers:
        typer.echo(f"{answer['input']}\t{answer['name']}\t{answer['probability']:.3f}")
    told = "with no filter: no request is in force"
    if state.filter:
        told = f"under filter {state.filter.id} for {', '.join(request.id for request in state.active)}"
    typer.echo(f"Answered {told}.", err=True)
