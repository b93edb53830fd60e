"""`fedup data`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedup.cli._options import JsonOption


def data(
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="Show the rows of a run folder's clients instead.")
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="With --run: the ids of this client's training rows.", min=0)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which data sets are on this machine, or which rows the clients of a run folder train on.

    Examples: [bold]fedup data[/], [bold]fedup data --run runs/mnist --client 3[/]
    """
    if run is None and client is not None:
        raise typer.BadParameter("--client needs the run folder: --run FOLDER.")
    if run is None:
        _show(_data_sets(), as_json, _print_data_sets)
    elif client is None:
        _show(_clients(run), as_json, _print_clients)
    else:
        _show(_ids(run, client), as_json, _print_ids)


def _show(found: Any, as_json: bool, show: Any) -> None:
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False)) if as_json else show(found)


def _data_sets() -> list[dict[str, Any]]:
    from fedup.bench.datasets import load_dataset
    from fedup.errors import FedUPError
    from fedup.registry import names

    found: list[dict[str, Any]] = []
    for name in names("fedup.bench.datasets"):
        try:
            dataset = load_dataset(name)
        except FedUPError as error:
            found.append({"name": name, "here": False, "why": str(error)})
            continue
        rows = {"rows": len(dataset.y), "test_rows": len(dataset.test_y), "classes": dataset.num_classes}
        found.append({"name": name, "here": True, **rows, "shape": list(dataset.x.shape[1:])})
    return found


def _clients(run: Path) -> list[dict[str, Any]]:
    from fedup.cli._session import Session

    federation = Session(run).federation
    return [
        {
            "client": client.id,
            "train": len(client.train),
            "validation": len(client.validation),
            "heldout": len(client.heldout),
            "train_by_class": federation.y[client.train].bincount(minlength=federation.num_classes).tolist(),
        }
        for client in federation.clients
    ]


def _ids(run: Path, client_id: int) -> dict[str, list[int]]:
    from fedup.cli._session import Session

    session = Session(run)
    federation = session.federation
    rows = federation.client(client_id).train
    return {name: rows[federation.y[rows] == label].tolist() for label, name in enumerate(session.dataset.class_names)}


def _print_data_sets(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from fedup.cli._progress import wide_console

    console = wide_console()
    table = Table("data set", "here", "rows", "test rows", "classes", "a row is")
    for one in found:
        if one["here"]:
            shape = "×".join(map(str, one["shape"]))
            table.add_row(one["name"], "yes", f"{one['rows']:,}", f"{one['test_rows']:,}", str(one["classes"]), shape)
        else:
            table.add_row(one["name"], "[yellow]no", "", "", "", "")
    console.print(table)
    for one in found:
        if not one["here"]:
            console.print(f"{one['name']}: {one['why']}", highlight=False, markup=False)


def _print_clients(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from fedup.cli._progress import wide_console

    table = Table("client", "train", "validation", "held out", "training rows by class")
    for one in found:
        by_class = " ".join(f"{count:>4}" for count in one["train_by_class"])
        table.add_row(
            str(one["client"]), f"{one['train']:,}", f"{one['validation']:,}", f"{one['heldout']:,}", by_class
        )
    wide_console().print(table)


def _print_ids(found: dict[str, list[int]]) -> None:
    for name, rows in found.items():
        typer.echo(f"{name}: {','.join(map(str, rows)) or 'none'}")
