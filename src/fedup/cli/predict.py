"""`fedup predict`."""

import json
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from fedup.cli import _options as options
from fedup.cli._wording import visible
from fedup.errors import ArtifactError
from fedup.registry import names as registered
from fedup.run.state import State

if TYPE_CHECKING:
    from fedup.tasks.datasets import Images, Tables, Texts

_BATCH = 256


def predict(
    inputs: Annotated[
        list[str], typer.Argument(help="Image, text, CSV, Parquet or npz files, folders; - is standard input.")
    ],
    run: options.RunOption = options.DEFAULT_RUN,
    filter_id: Annotated[
        str | None,
        typer.Option("--filter", help="Refuse unless this filter (its first digits) is in force; none: no filter."),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of Parquet files; by default image or text.")] = None,
    resize: Annotated[bool, typer.Option("--resize", help="Resize images of another size.")] = False,
    model: options.ModelPathOption = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Classify images, texts or rows of a table under the filter in force; each answer names the filter.

    Columns of a table are found by their names; rows are named by their id, if training had a column of ids.
    Text files and standard input hold one text per line. With --json each answer is a line of JSON. For the folder of a
    server app inputs are rows as its nodes prepare them, in .npy files or as `x` in .npz files.

    Examples:
    [bold]fedup predict digit.png[/]
    [bold]fedup predict new_patients.csv --run runs/patients[/]
    [bold]cat news.txt | fedup predict - --run runs/news --json[/]
    """
    from fedup.cli._inputs import InputReader, PreparedRows
    from fedup.cli._session import Session
    from fedup.tasks.evaluation import predict as logits_for
    from fedup.tasks.scores import answer_in_words

    session = Session(run, device=device, model=model)
    state, answering = session.answering()
    in_force = state.filter.sha256 if state.filter else "none"
    if filter_id is not None and (not filter_id or not in_force.startswith(filter_id.lower())):
        raise ArtifactError(
            f"The filter in force is {in_force[:16]}, and {filter_id!r} was asked for: nothing was answered. "
            "`fedup status` shows what is in force."
        )
    remote = session.is_remote
    reader = (
        PreparedRows(*session.row_form(state))
        if remote
        else InputReader(_inputs(session.recipe.data, state), column, resize)
    )
    items = reader.read(inputs)
    while batch := list(islice(items, _BATCH)):
        x = reader.inputs.prepare([raw for _, raw in batch]).to(session.device)
        for (own, _), outputs in zip(batch, logits_for(answering, x), strict=True):
            names = state.about["class_names"] or [str(number) for number in range(len(outputs))]
            said, words = answer_in_words(outputs, session.targets(state), names)
            answer = {"input": own, **said, "filter": state.filter.id if state.filter else None}
            typer.echo(json.dumps(answer, ensure_ascii=False) if as_json else visible(f"{own}\t{words}"))
    if not as_json:
        ids = ", ".join(request.id for request in state.active)
        part = "by head" if state.is_exact else "under filter"
        served = f"{part} {state.filter.id}" if state.filter else "with no filter: none is in force"
        filtered = f"{served} for {ids}" if ids else served
        typer.echo(f"Answered {filtered}.", err=True)


def _inputs(data: str, state: State) -> "Images | Tables | Texts":
    """How inputs are read: as the data set's code says; for the user's own files, as the run folder says."""
    from fedup.tasks.datasets import input_of, inputs_from

    trained_with = state.about["input"]
    has_code = data.endswith(".py") or data in registered("fedup.tasks.datasets")
    inputs = input_of(data) if has_code else inputs_from(trained_with)
    if inputs.identity() != trained_with:
        raise ArtifactError(
            "Inputs would be read otherwise than at training (another vocabulary or image size): nothing was answered."
        )
    return inputs
