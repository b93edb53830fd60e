"""`fedup data`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedup.cli import _options as options
from fedup.cli._complete import data_sets
from fedup.cli._progress import progress_bars, wide_console
from fedup.errors import FedUPError, MissingDataError, SettingError
from fedup.registry import names as registered

if TYPE_CHECKING:
    from torch import Tensor

    from fedup.federation import Federation

app = typer.Typer(invoke_without_command=True)


@app.callback()
def data(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option("--run", "-r", help="Show the rows of a run folder's clients.")] = None,
    client: Annotated[int | None, typer.Option(help="With --run: ids of this client's training rows.", min=0)] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show, check or fetch data sets; or show the rows of a run folder's clients.

    Examples:
    [bold]fedup data[/]
    [bold]fedup data check mnist[/]
    [bold]fedup data --run runs/mnist --client 3[/]
    """
    if context.invoked_subcommand is not None:
        return
    if run is None and client is not None:
        raise typer.BadParameter("--client needs the run folder: --run FOLDER.")
    if run is None:
        options.show(_data_sets(), as_json, _print_data_sets)
        return
    from fedup.cli._session import Session

    federation = (session := Session(run)).federation
    if client is None:
        options.show(_clients(federation), as_json, _print_clients)
        return
    rows, names = federation.client(client).train, session.dataset.class_names
    ids = {name: rows[own].tolist() for name, own in zip(names, _by_class(federation, rows), strict=False)}
    text = "\n".join(f"{name}: {','.join(map(str, own)) or 'none'}" for name, own in ids.items())
    options.show(ids, as_json, lambda _: typer.echo(text))


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets, .py files, Parquet files; all by default.", autocompletion=data_sets),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Read every row of data sets and say what is missing or damaged; exit 1 if anything is.

    A data set that is missing counts only where it was named.
    Decoded images are cached (FEDUP_CACHE), so that the first use is as fast as later ones.

    Examples:
    [bold]fedup data check[/]
    [bold]fedup data check cifar10 my_photos/[/]
    """
    found = _data_sets(names)
    options.show(found, as_json, _print_data_sets)
    if any(own["state"] == "damaged" or (names and own["state"] != "here") for own in found):
        raise typer.Exit(1)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The data set.", autocompletion=data_sets)],
    to: Annotated[Path | None, typer.Option(help="Folder for data sets.", envvar="FEDUP_DATA")] = None,
) -> None:
    """Get a data set's files from the Hugging Face hub; those that are there already are kept.

    Example: [bold]fedup data fetch mnist --to ~/data[/]
    """
    from fedup.tasks.datasets import files_of
    from fedup.tasks.datasets._hub import download, to_fetch

    files = files_of(name)
    if not files:
        typer.echo(f"{name} needs no download.")
        return
    if to is None:
        raise typer.BadParameter("Say where to: --to FOLDER, or set FEDUP_DATA.")
    lacking = to_fetch(files, to)
    with progress_bars(wide_console(stderr=True)) as show:
        for file in lacking:
            download(file, to, lambda done, size, what=file.place: show(what, done, size or done))  # type: ignore[misc]
    typer.echo(f"{name}: {len(lacking)} files fetched to {to}, {len(files) - len(lacking)} were there. ")
    typer.echo(f"Check them: FEDUP_DATA={to} fedup data check {name}")


def _data_sets(wanted: list[str] | None = None) -> list[dict[str, Any]]:
    from fedup.tasks.datasets import load_dataset

    def describe(name: str) -> dict[str, Any]:
        try:
            dataset = load_dataset(name)
        except SettingError:  # no such data set at all
            raise
        except FedUPError as error:
            state = "missing" if isinstance(error, MissingDataError) else "damaged"
            return {"name": name, "here": False, "state": state, "why": str(error)}
        rows = {"rows": len(dataset.y), "test_rows": len(dataset.test_y), "classes": dataset.num_classes}
        return {"name": name, "here": True, "state": "here", **rows, "shape": list(dataset.x.shape[1:])}

    return [describe(name) for name in wanted or registered("fedup.tasks.datasets")]


def _by_class(federation: "Federation", rows: "Tensor") -> "list[Tensor]":
    """By class or label, a mask of the rows that have it; of values, which all rows have, one mask."""
    y = federation.y[rows]
    if federation.targets == "classes":
        return [y == label for label in range(federation.num_classes)]
    return list(y.T) if federation.targets == "labels" else [y[:, 0] == y[:, 0]]


def _clients(federation: "Federation") -> list[dict[str, Any]]:
    return [
        {
            "client": client.id,
            **{part: len(getattr(client, part)) for part in ("train", "validation", "heldout")},
            "train_by_class": [int(own.sum()) for own in _by_class(federation, client.train)],
        }
        for client in federation.clients
    ]


def _print_data_sets(found: list[dict[str, Any]]) -> None:
    console, missing = wide_console(), [own for own in found if not own["here"]]
    table = Table("data set", "here", "rows", "test rows", "classes", "a row is")
    for own in found:
        counts = [] if own in missing else [f"{own[name]:,}" for name in ("rows", "test_rows", "classes")]
        shape = [] if own in missing else ["×".join(map(str, own["shape"]))]
        table.add_row(own["name"], "yes" if own["here"] else f"[yellow]{own['state']}", *counts, *shape)
    console.print(table)
    for own in missing:
        console.print(f"{own['name']}: {own['why']}", markup=False, soft_wrap=True)


def _print_clients(found: list[dict[str, Any]]) -> None:
    table = Table("client", "train", "validation", "held out", "training rows by class")
    for own in found:
        by_class = " ".join(f"{count:>4}" for count in own["train_by_class"])
        table.add_row(str(own["client"]), *(f"{own[part]:,}" for part in ("train", "validation", "heldout")), by_class)
    wide_console().print(table)
