"""`fedup list`."""

from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from fedup.cli import _options as options
from fedup.errors import SettingError
from fedup.registry import names

_DEPTHS = ("", "*/", "*/*/")  # deep enough for runs/NAME, and fast in a large folder


def list_(
    folder: Annotated[
        Path, typer.Argument(help="Where to look for run folders; or `cuts`, to list where filters can sit in a model.")
    ] = Path(),
    model: Annotated[str | None, typer.Argument(help="The model, after `cuts`.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """List data sets, models, methods and run folders by name; or the cuts of a model.

    Examples:
    [bold]fedup list runs[/]
    [bold]fedup list cuts resnet18[/]
    """
    if str(folder) == "cuts" and model is not None:
        _list_cuts(model, as_json)
        return
    if model is not None or (str(folder) == "cuts" and not folder.is_dir()):
        raise SettingError("The cuts of a model are listed by `fedup list cuts MODEL`, as in `fedup list cuts lenet5`.")
    if not folder.is_dir():
        raise SettingError(f"There is no folder {folder} to look for run folders in.")
    from fedup.tasks.recipe import PARTITIONS

    listed = {
        "data": names("fedup.tasks.datasets"),
        "models": names("fedup.tasks.models"),
        "backbones": names("fedup.tasks.backbones"),
        "partitions": list(PARTITIONS),
        "scenarios": names("fedup.bench.scenarios"),
        "methods": names("fedup.bench.methods"),
        "metrics": names("fedup.bench.metrics"),
        "runs": sorted(str(path.parent) for depth in _DEPTHS for path in folder.glob(f"{depth}run.sqlite")),
    }
    options.show(listed, as_json, _print)


def _print(listed: dict[str, list[str]]) -> None:
    for kind, entries in listed.items():
        # Paths stay whole, one after another; names are broken to fit a terminal.
        text = ", ".join(entries) or "none"
        lines = [text] if kind == "runs" else wrap(text, 88)
        typer.echo(f"{kind:<11} " + f"\n{'':<12}".join(lines))


def _list_cuts(model: str, as_json: bool) -> None:
    """From early to late; filters act on what enters the module of that name."""
    from fedup.tasks.models import cuts_of

    cuts = cuts_of(model)
    if not cuts:
        raise SettingError(f"{model} names no cuts: a filter sits before its last linear layer.")
    text = (
        f"{model}, from early to late: {', '.join(cuts)}\nA filter acts on what enters the module named; by default "
        f"the bottleneck sits at {cuts[-1]}."
    )
    options.show({"model": model, "cuts": list(cuts)}, as_json, lambda _: typer.echo(text))
