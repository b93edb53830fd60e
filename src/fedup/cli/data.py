"""`fedup data`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedup.cli import _options as options
from fedup.cli._complete import data_sets
from fedup.cli._progress import progress_bars, wide_console
from fedup.cli._settings import Settings, with_settings
from fedup.errors import FedUPError, MissingDataError, SettingError
from fedup.registry import names as registered
from fedup.target_words import OUTPUT

if TYPE_CHECKING:
    from torch import Tensor

    from fedup.federation import Federation
    from fedup.target_words import Targets
    from fedup.tasks.file_options import FileOptions

app = typer.Typer(invoke_without_command=True)


@app.callback()
def data(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option("--run", "-r", help="Show the rows of a run folder's clients.")] = None,
    client: Annotated[
        str | None, typer.Option(help="With --run: ids of this client's training rows; its number or name.")
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
        return
    from fedup.cli._session import Session

    federation = (session := Session(run)).federation
    if client is None:
        found = _clients(federation, session.dataset.client_names)
        options.show(found, as_json, lambda found: _print_clients(found, federation.targets))
        return
    number = _client_number(client, session.dataset.client_names)
    rows, names = federation.client(number).train, session.dataset.class_names
    ids = {name: rows[own].tolist() for name, own in zip(names, _by_class(federation, rows), strict=False)}
    row_ids = session.dataset.row_ids
    text = "\n".join(f"{name}: {_listed(own, row_ids)}" for name, own in ids.items())
    options.show(ids, as_json, lambda _: typer.echo(text))


@app.command()
@with_settings(file="fedup.tasks.file_options.FileOptions")
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets, own files or folders; all data sets by default.", autocompletion=data_sets),
    ] = None,
    *,
    file: Settings,
    as_json: options.JsonOption = False,
) -> None:
    """Read every row of data sets and say what is missing or damaged; exit 1 if anything is.

    Of a file of your own: which column will be used as what, and what is wrong. It takes the options of `fedup train`.
    A data set that is missing counts only where it was named.
    Decoded images are cached (FEDUP_CACHE), so that the first use is as fast as later ones.

    Examples:
    [bold]fedup data check[/]
    [bold]fedup data check cifar10 my_photos/[/]
    [bold]fedup data check patients.csv --label diagnosis --clients-column hospital[/]
    """
    from fedup.cli._tables import options_from

    found = _data_sets(names, options_from(file))
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


def _own_file(name: str, file: "FileOptions | None") -> dict[str, Any] | None:
    """What a table or a folder of images holds; None for any other data set."""
    from fedup.cli._tables import describe_images, describe_table
    from fedup.tasks.datasets import OwnTable, own_source

    start = time.perf_counter()
    own = own_source(name, file.with_constants() if file else None)
    if own is None:
        return None
    found = describe_table(own) if isinstance(own, OwnTable) else describe_images(own)
    state = "damaged" if found["problems"] else "here"
    return {"name": name, "here": not found["problems"], "state": state, "own": True, **found} | {
        "time_s": time.perf_counter() - start
    }


def _data_sets(wanted: list[str] | None = None, file: "FileOptions | None" = None) -> list[dict[str, Any]]:
    from fedup.tasks.datasets import load_dataset

    def describe(name: str) -> dict[str, Any]:
        try:
            if (own := _own_file(name, file)) is not None:
                return own
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


def _client_number(text: str, names: tuple[str, ...]) -> int:
    """The client of that name, or of that number where no client has the name."""
    if text in names:
        return names.index(text)
    if not text.isdecimal():
        known = f"there are {', '.join(names[:8])}" if names else "the clients have numbers only"
        raise SettingError(f"There is no client {text!r}; {known}.")
    return int(text)


def _listed(rows: list[int], row_ids: tuple[str, ...] | None) -> str:
    """Row numbers, with the rows' own ids where they have them."""
    texts = [str(row) if row_ids is None else f"{row} ({row_ids[row]})" for row in rows]
    return ("," if row_ids is None else ", ").join(texts) or "none"


def _clients(federation: "Federation", names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "client": client.id,
            **({"name": names[client.id]} if names else {}),
            **{part: len(getattr(client, part)) for part in ("train", "validation", "heldout")},
            "train_by_class": [int(own.sum()) for own in _by_class(federation, client.train)],
        }
        for client in federation.clients
    ]


def _print_data_sets(found: list[dict[str, Any]]) -> None:
    from fedup.cli._tables import print_own

    console = wide_console()
    for own in [own for own in found if own.get("own")]:
        print_own(console, own)
    found = [own for own in found if not own.get("own")]
    missing = [own for own in found if not own["here"]]
    if not found:
        return
    table = Table("data set", "here", "rows", "test rows", "classes", "a row is")
    for own in found:
        counts = [] if own in missing else [f"{own[name]:,}" for name in ("rows", "test_rows", "classes")]
        shape = [] if own in missing else ["×".join(map(str, own["shape"]))]
        table.add_row(own["name"], "yes" if own["here"] else f"[yellow]{own['state']}", *counts, *shape)
    if len(found) > 1 or not missing:
        console.print(table)
    for own in missing:
        why = own["why"].removeprefix(f"{own['name']}: ")
        said = why if why.startswith(own["name"]) else f"{own['name']}: {why}"
        console.print(said, markup=False, soft_wrap=True)


def _print_clients(found: list[dict[str, Any]], targets: "Targets") -> None:
    counted = [] if targets == "values" else [f"training rows by {OUTPUT[targets]}"]
    table = Table("client", "train", "validation", "held out", *counted)
    for own in found:
        by_class = [" ".join(f"{count:>4}" for count in own["train_by_class"])] if counted else []
        named = f"{own['client']} {own['name']}" if "name" in own else str(own["client"])
        table.add_row(escape(named), *(f"{own[part]:,}" for part in ("train", "validation", "heldout")), *by_class)
    wide_console().print(table)
