"""`fedup bench paper`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedup.cli._options import ThreadsOption
from fedup.cli._progress import cell_progress, wide_console
from fedup.cli.bench import _shared as common

if TYPE_CHECKING:
    from fedup.bench.reproduction.pool import Pool
    from fedup.bench.reproduction.queue import Queue
    from fedup.bench.reproduction.tables import PaperTable


def paper(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this table, or cells of this federation, data set, model, scenario or method."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds for all pairs instead of those needed, as 0-2.")] = None,
    budget_minutes: common.BudgetOption = None,
    report: Annotated[
        bool, typer.Option("--report", help="Write the page and docs/reproduction.md; run none.")
    ] = False,
    times: Annotated[bool, typer.Option("--times", help="Take missing clean times, on an idle device.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is there already.")] = False,
    note: Annotated[str | None, typer.Option(help="Kept with each result, for those who read its times.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long, and stop.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder with experiments/paper/ and results/.")] = Path("benchmarks"),
    results: Annotated[Path | None, typer.Option(help="Folder of results; by default FOLDER/results.")] = None,
    device: common.DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Run what is missing of the paper's tables and figures: the first seed and small pairs first.

    Results of other experiments count where the configuration is the same. New ones go to RESULTS/paper. It says
    beforehand how many cells are missing and about how long they take. Interrupt it anywhere and run the same command
    again.

    Example: [bold]fedup bench paper --only rank --budget-minutes 10[/]

    Example: [bold]fedup bench paper --report[/]
    """
    from fedup.bench.reproduction.pool import Pool
    from fedup.bench.reproduction.queue import make_queue
    from fedup.bench.reproduction.tables import load_tables

    place = results or folder / "results"
    if report:
        from fedup.bench.reproduction.page import write_page

        for path in write_page(folder, place):
            typer.echo(f"wrote {path}")
        return
    pool, experiments = Pool(place), folder / "experiments" / "paper"
    tables = load_tables(experiments)
    chosen = common.parse_seeds(seeds) if seeds else None
    queue = make_queue(tables, pool, only=only or (), seeds=chosen, force=force, folder=experiments)
    if times:
        _take_times(queue, pool, budget_minutes, device, dry_run=dry_run)
        return
    _say(tables, queue)
    if dry_run or not queue.cells:
        return
    _run(queue, pool, budget_minutes, device, force=force, note=note)


def _say(tables: "list[PaperTable]", queue: "Queue") -> None:
    """What is there, what is missing, and about how long it takes."""
    from fedup.bench.format import show_count

    for table in tables:
        done, ready, waiting = queue.of(table)
        if done + ready + waiting:
            text = f"{done} of {done + ready + waiting} cells are there"
            text += f", {ready} to run" if ready else ""
            text += f", {waiting} wait" if waiting else ""
            typer.echo(f"{table.about.number} ({table.name}): {text}")
    for cells, estimate, words in (
        (queue.cells, queue.estimate, "to run, each once, however many tables share it"),
        (queue.later, queue.later_estimate, "wait for settings that are not chosen yet"),
    ):
        if cells:
            kind = "part of it a guess: no such pair or method was measured" if estimate.is_guess else "from like cells"
            minutes = max(1, round(estimate.seconds / 60))
            about = f"about {show_count(minutes, 'minute')} on a GPU of its own ({kind})"
            typer.echo(f"{show_count(len(cells), 'cell')} {words}: {about}.")
    for command in queue.commands:
        typer.echo(f"First: {command}")
    if not queue.cells:
        typer.echo("Nothing to run. Next: fedup bench paper --report")


def _run(
    queue: "Queue", pool: "Pool", budget_minutes: float | None, device: str, *, force: bool, note: str | None
) -> None:
    from fedup.bench.runner import run_cells
    from fedup.cli._session import checked_device

    common.check_data(queue.cells)
    console, budget_s, where = wide_console(stderr=True), budget_minutes and 60 * budget_minutes, checked_device(device)
    failed = ended = 0
    with cell_progress(console, len(queue.cells)) as (show, tell), common.until_time_is_over(console):
        for event in run_cells(
            queue.cells, pool, device=where, progress=show, budget_s=budget_s, force=force, note=note
        ):
            failed, ended = failed + (event.outcome == "failed"), ended + 1
            tell(event)
    left = len(queue.cells) - ended
    typer.echo(f"{ended - failed} cells done, {failed} failed, {left} left. Next: fedup bench paper --report")
    if failed:
        raise typer.Exit(1)


def _take_times(queue: "Queue", pool: "Pool", budget_minutes: float | None, device: str, *, dry_run: bool) -> None:
    """Clean times of the finished cells of tables that show times, with the first seed."""
    from fedup.bench.timing import time_cells, to_time
    from fedup.cli._progress import progress_bars
    from fedup.cli._session import checked_device
    from fedup.cli.bench.time import check_idle

    where, console = checked_device(device), wide_console(stderr=True)
    timed = {
        one.cell.hash: one.cell
        for one in queue.wanted
        if one.table.about.timed and one.cell.group.recipe.seed == one.table.parts[0].experiment.seeds[0]
    }
    cells = to_time(list(timed.values()), pool, device=where)
    typer.echo(f"{len(cells)} finished cells have no clean time from this device.")
    if dry_run or not cells:
        return
    common.check_data(cells)
    check_idle(where)
    budget_s = budget_minutes and 60 * budget_minutes
    with progress_bars(console) as show, common.until_time_is_over(console):
        for event in time_cells(cells, pool, device=where, progress=show, budget_s=budget_s):
            seconds = event.timing.get("median", {}).get("time")
            typer.echo(f"{event.cell}: {event.error or f'{seconds:.3f} s'}")
