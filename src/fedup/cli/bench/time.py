"""`fedup bench time`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._progress import progress_bars, wide_console
from fedup.cli.bench import _shared as common
from fedup.errors import SettingError


def time(
    experiment: common.ExperimentArgument,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cells of this federation, data set, model, scenario or method; as in `bench run`."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0-4 or 0,1,5; by default the first.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each cell, after one that is not timed.", min=3)] = 3,
    budget_minutes: common.BudgetOption = None,
    results: Annotated[Path, typer.Option(help="Folder of results; each experiment has one in it.")] = common.RESULTS,
    force: Annotated[bool, typer.Option("--force", help="Time again what has clean times already.")] = False,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Go on where the device is not idle; such times are marked, and count nowhere."),
    ] = False,
    note: Annotated[str | None, typer.Option(help="Kept with the times.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be timed, and stop.")] = False,
    device: common.DeviceOption = "auto",
) -> None:
    """Take clean times of finished cells: one process, an idle device, one warm-up, the median of three runs.

    Accuracies are not measured again; times go beside the results, in files of their own. A federation that is not in
    the cache is trained first, outside of what is timed. Clients come first, then classes; Retrain and FedUP first.

    Example: [bold]fedup bench time benchmarks/experiments/main.toml --only mnist --budget-minutes 10[/]
    """
    from fedup.bench.experiment import load_experiment
    from fedup.bench.results import Results
    from fedup.bench.timing import finished, is_clean, time_cells, to_time
    from fedup.cli._session import checked_device

    loaded, device = load_experiment(experiment), checked_device(device)
    cells = loaded.cells(seeds=common.parse_seeds(seeds) if seeds else loaded.seeds[:1], only=only or ())
    store = Results(results / loaded.name)
    with_figures = finished(cells, store)
    missing = to_time(cells, store, device=device, force=force)
    for cell in missing:
        typer.echo(str(cell))
    typer.echo(
        f"{len(missing)} cells to time on {device}, each once to warm up and {repeats} times.\n"
        f"{len(with_figures) - len(missing)} have clean times; {len(cells) - len(with_figures)} have no figures and "
        "are left out."
    )
    if dry_run or not missing:
        return
    common.check_data(missing)
    if not shared:
        check_idle(device)
    console, budget_s = wide_console(stderr=True), budget_minutes and 60 * budget_minutes
    clean = failed = 0
    work = partial(time_cells, missing, store, device=device, repeats=repeats, budget_s=budget_s, note=note)
    with progress_bars(console) as show, common.until_time_is_over(console):
        for event in work(progress=show):
            clean += is_clean(event.timing)
            failed += bool(event.error)
            outcome = f"failed: {event.error}" if event.error else f"{event.timing['median']['time']:.4g} s"
            mark = "" if event.error or is_clean(event.timing) else ", shared"
            line = f"[{event.done}/{event.total}] {event.cell}: {outcome}{mark}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    typer.echo(f"{clean} of {len(missing)} cells have clean times now, {failed} failed.\nNext: fedup bench report")
    if failed:
        raise typer.Exit(1)


def check_idle(device: str) -> None:
    """Raise where a time would not be clean."""
    from fedup.bench.alone import look_once

    state = look_once(device)
    if state.alone is not True:
        raise SettingError(
            f"The device is not idle ({state.others or 'nothing could be seen'}): a time that is taken now counts "
            "nowhere. End what else runs, or pass --shared to take times that are marked. Nothing was timed."
        )
