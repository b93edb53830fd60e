"""`fedup data`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedup.cli import _options as options
from fedup.cli._complete import data_sets
from fedup.cli._progress import progress_bars, wide_console
from fedup.errors import FedUPError, MissingDataError, SettingError
from fedup.registry import names as registered

app = typer.Typer(invoke_without_command=True)


@app.callback()
def data(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="Show the rows of a run folder's clients instead.")
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="With --run: the ids of this client's training rows.", min=0)
    ] = None,
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
    elif client is None:
        options.show(_clients(run), as_json, _print_clients)
    else:
        options.show(_ids(run, client), as_json, _print_ids)


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
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for data sets.", envvar="FEDUP_DATA", show_envvar=True)
    ] = None,
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


def _clients(run: Path) -> list[dict[str, Any]]:
    from fedup.cli._session import Session

    federation = Session(run).federation
    return [
        {
            "client": client.id,
            **{part: len(getattr(client, part)) for part in ("train", "validation", "heldout")},
            "train_by_class": federation.y[client.train].bincount(minlength=federation.num_classes).tolist(),
        }
        for client in federation.clients
    ]


def _ids(run: Path, client_id: int) -> dict[str, list[int]]:
    from fedup.cli._session import Session

    federation = (session := Session(run)).federation
    rows = federation.client(client_id).train
    return {name: rows[federation.y[rows] == label].tolist() for label, name in enumerate(session.dataset.class_names)}


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


def _print_ids(found: dict[str, list[int]]) -> None:
    for name, rows in found.items():
        typer.echo(f"{name}: {','.join(map(str, rows)) or 'none'}")
