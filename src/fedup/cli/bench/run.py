"""`fedup bench run`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._options import ThreadsOption
from fedup.cli._progress import cell_progress, wide_console
from fedup.cli.bench import _shared as common


def run(
    experiment: common.ExperimentArgument,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only cells of this federation, data set, model, scenario or method. Repeated, names of one kind "
            "widen the choice and names of different kinds narrow it."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the experiment's, as 0-4 or 0,1,5.")] = None,
    budget_minutes: common.BudgetOption = None,
    results: Annotated[Path, typer.Option(help="Folder for results; each experiment has one in it.")] = common.RESULTS,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is there already.")] = False,
    note: Annotated[str | None, typer.Option(help="Kept with each result, for those who read its times.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    device: common.DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Run what is missing of an experiment: every federation × scenario × seed × method, one result file each.

    Interrupt it anywhere and run the same command again: finished cells stay, a federation in training goes on.

    A cell that fails is recorded with its error, and the others go on; the exit status is then 1.

    Example: [bold]fedup bench run benchmarks/experiments/smoke.toml[/]

    Example: [bold]fedup bench run benchmarks/experiments/main.toml --only mnist --only class --seeds 0-4[/]
    """
    from fedup.bench.experiment import load_experiment
    from fedup.bench.results import Results
    from fedup.bench.runner import run_cells
    from fedup.cli._session import checked_device

    loaded = load_experiment(experiment)
    cells = loaded.cells(seeds=common.parse_seeds(seeds) if seeds else None, only=only or ())
    store = Results(results / loaded.name)
    missing = [cell for cell in cells if force or not store.is_done(cell)]
    if dry_run or not missing:
        for cell in missing:
            typer.echo(str(cell))
        typer.echo(f"{len(cells) - len(missing)} of {len(cells)} cells are done; {len(missing)} to run.")
        return
    common.check_data(missing)
    console = wide_console(stderr=True)
    failed, budget_s, checked = 0, budget_minutes and 60 * budget_minutes, checked_device(device)
    with cell_progress(console, len(cells)) as (show, tell), common.until_time_is_over(console):
        for event in run_cells(cells, store, device=checked, progress=show, budget_s=budget_s, force=force, note=note):
            failed += event.outcome == "failed"
            tell(event)
    left = sum(not store.is_done(cell) for cell in cells) - failed
    typer.echo(
        f"{len(cells) - left - failed} of {len(cells)} cells done, {failed} failed, {left} left.\n"
        f"Results: {store.folder}. Next: fedup bench report"
        + (f" {experiment} --results {results}" if results != common.RESULTS else "")
        + ("\nReasons of failures are in the result files, and in the report." if failed else "")
    )
    if failed:
        raise typer.Exit(1)
