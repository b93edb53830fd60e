"""`fedup add`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedup.cli import _options as options


def add(
    data: Annotated[
        str, typer.Argument(help="Rows with labels, as training had them: a table, a folder of images, a .py file.")
    ],
    run: options.RunOption = options.DEFAULT_RUN,
    client: Annotated[
        str | None, typer.Option(help="Whose rows they are, by name or number; a column of clients says so itself.")
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Clients that are not known yet join with these rows.")] = False,
    subject_key: options.SubjectKeyOption = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Exact mode: add rows of known clients, or clients that join, as if they had been there from the start.

    The head is solved again from all rows that no request leaves out. The same file is added once.

    Examples:
    [bold]fedup add june.csv --run runs/patients[/]
    [bold]fedup add more_images --client 3[/]
    [bold]fedup add new_hospital.csv --join[/]
    """
    from fedup.cli._adding import add_rows, print_added
    from fedup.cli._session import Session

    session = Session(run, device=device, subject_key=subject_key)
    result: dict[str, Any] = add_rows(session, data, client, join=join, wait_s=wait)
    options.show(result, as_json, lambda result: print_added(result, Path(run)))
