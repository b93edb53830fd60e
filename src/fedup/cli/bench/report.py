"""`fedup bench report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    experiments: Annotated[
        list[Path] | None,
        typer.Argument(help="Experiments (TOML); by default all that there are in the folder."),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder of results; by default results/ below the folder.")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Folder with experiments/, results/ and speed/; tables/ and pages/ are written there.")
    ] = Path("benchmarks"),
) -> None:
    """Make tables (Markdown, CSV) and pages (HTML) from result files.

    Example: [bold]fedup bench report[/]

    Example: [bold]fedup bench report mine.toml --results /tmp/results --folder /tmp/report[/]
    """
    from fedup.bench.result_tables import write_tables

    for path in (written := write_tables(folder, experiments or (), results)):
        typer.echo(f"wrote {path}")
    if not written:
        typer.echo("Nothing changed: all tables and pages are up to date.")
