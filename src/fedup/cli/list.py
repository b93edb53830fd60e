"""`fedup list`."""

import json
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from fedup.cli._options import JsonOption
from fedup.errors import SettingError

_DEPTHS = ("", "*/", "*/*/")  # deep enough for runs/NAME, and fast in a large folder


def list_(
    folder: Annotated[Path, typer.Argument(help="Where to look for run folders.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """List what there is by name (data sets, models, scenarios, methods, metrics), and the run folders below a folder.

    Example: [bold]fedup list runs[/]
    """
    if not folder.is_dir():
        raise SettingError(f"There is no folder {folder} to look for run folders in.")
    from fedup.bench.recipe import PARTITIONS
    from fedup.registry import names

    found = {
        "data": names("fedup.bench.datasets"),
        "models": names("fedup.bench.models"),
        "partitions": list(PARTITIONS),
        "scenarios": names("fedup.bench.scenarios"),
        "methods": names("fedup.bench.methods"),
        "metrics": names("fedup.bench.metrics"),
        "runs": sorted(str(path.parent) for depth in _DEPTHS for path in folder.glob(f"{depth}run.sqlite")),
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for kind, entries in found.items():
        # Paths stay whole, one after another; names are broken to fit a terminal.
        text = ", ".join(entries) or "none"
        lines = [text] if kind == "runs" else wrap(text, 88)
        typer.echo(f"{kind:<11} " + f"\n{'':<12}".join(lines))
