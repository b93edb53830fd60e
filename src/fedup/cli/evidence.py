"""`fedup evidence`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli import _options as options
from fedup.cli._complete import requests
from fedup.run.evidence import build_evidence, write_evidence
from fedup.run.folder import Run
from fedup.run.store import hash_of


def evidence(
    request: Annotated[str, typer.Argument(help="The request, by id (R1) or reference.", autocompletion=requests)],
    run: options.RunOption = options.DEFAULT_RUN,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the two files; by default evidence/ in the run folder, on record.")
    ] = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Write one JSON file and one HTML page about a request: what was asked, what it did, what is claimed.

    Example: [bold]fedup evidence R1 --run runs/mnist[/]
    """
    folder = Run(run)
    if out is not None:
        built = build_evidence(folder, folder.read(), request)
        paths = write_evidence(built, out)
    else:
        with folder.writing("evidence", wait_s=wait) as writer:
            built = build_evidence(folder, writer.state, request)
            paths = write_evidence(built, run / "evidence")
            files = {path.name: hash_of(path)[0] for path in paths}
            writer.commit("evidenced", {"request": built["request"]["id"], "files": files})
    message = f"Wrote {paths[1]} and {paths[0].name} beside it. Journal head: {built['journal']['head'][:16]}"
    options.show({**built, "files": [str(path) for path in paths]}, as_json, lambda _: typer.echo(message))
