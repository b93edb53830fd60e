"""`fedup export`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli import _options as options


def export(
    out: Annotated[Path, typer.Argument(help="The file to write, such as model.pt2.")],
    run: options.RunOption = options.DEFAULT_RUN,
    as_json: options.JsonOption = False,
) -> None:
    """Write the model under its filter as one torch program that runs without fedup.

    The program is a snapshot: requests that come later do not reach it.
    To run it in Python: [bold]torch.export.load("model.pt2").module()(x)[/]

    Example: [bold]fedup export model.pt2 --run runs/mnist[/]
    """
    from fedup.cli._session import Session
    from fedup.serving.export import export_program

    session = Session(run)
    state, served = session.answering()  # without a request in force, the original model
    about = {
        "filter": state.filter.id if state.filter else None,
        "filter_sha256": state.filter.sha256 if state.filter else None,
        "base": state.base,
        "requests": [{"id": request.id, "digest": request.forget.digest} for request in state.active],
        **{
            name: state.about[name]
            for name in ("class_names", "input_shape", "input", "targets")
            if name in state.about
        },
        "journal_head": state.head,
    }
    inputs = session.probe(state)
    export_program(served, inputs, out, about=about)
    under = f"under filter {about['filter']}" if state.active else "without a filter: no request is in force"
    shape = ", ".join(map(str, ["N", *inputs.shape[1:]]))
    text = (
        f"Wrote {out}: the model {under}. A snapshot: requests that come later do not reach it.\n"
        f"It takes inputs of shape ({shape}), prepared as in training; fedup.json inside names classes and scaling."
    )
    options.show({**about, "file": str(out)}, as_json, lambda _: typer.echo(text))
