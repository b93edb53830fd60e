"""`fedup bench …`."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedup.cli._options import ThreadsOption
from fedup.cli._progress import progress_bars, wide_console
from fedup.errors import SettingError
from fedup.files import write_text

app = typer.Typer(help="Measure: experiments, speed, and the figures of the core.", no_args_is_help=True)
_RESULTS = Path("benchmarks/results")


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="A TOML file, as in benchmarks/experiments.")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only cells of this federation, data set, model, scenario or method. Repeated, names of one kind "
            "widen the choice and names of different kinds narrow it."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the experiment's, as 0-4 or 0,1,5.")] = None,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly before so many minutes are over.", min=0)
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for results; each experiment has one below it.")] = _RESULTS,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is there already.")] = False,
    note: Annotated[
        str | None, typer.Option(help="Kept with each result: what else a reader of its times should know.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, …")] = "auto",
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
    from fedup.bench.runner import BudgetSpentError, run_cells
    from fedup.cli._progress import cell_progress
    from fedup.cli._session import checked_device
    from fedup.tasks.datasets import check_there

    asked = load_experiment(experiment)
    cells = asked.cells(seeds=_parse_seeds(seeds) if seeds else None, only=only or ())
    store = Results(results / asked.name)
    missing = [cell for cell in cells if force or not store.is_done(cell)]
    if dry_run or not missing:
        for cell in missing:
            typer.echo(str(cell))
        typer.echo(f"{len(cells) - len(missing)} of {len(cells)} cells are done; {len(missing)} to run.")
        return
    for name in sorted({cell.group.recipe.data for cell in missing}):
        check_there(name)  # before the first hour of work, not after it
    console = wide_console(stderr=True)
    failed = 0
    with cell_progress(console, len(cells)) as (show, tell):
        try:
            for event in run_cells(
                cells,
                store,
                device=checked_device(device),
                progress=show,
                budget_s=None if budget_minutes is None else 60 * budget_minutes,
                force=force,
                note=note,
            ):
                failed += event.outcome == "failed"
                tell(event)
        except BudgetSpentError:
            console.print("The time given is over; the same command goes on from here.", highlight=False)
    left = sum(not store.is_done(cell) for cell in cells) - failed
    typer.echo(
        f"{len(cells) - left - failed} of {len(cells)} cells done, {failed} failed, {left} left.\n"
        f"Results: {store.folder}. Next: fedup bench report"
        + (f" {experiment} --results {results}" if results != _RESULTS else "")
        + ("\nReasons of failures are in the result files, and in the report." if failed else "")
    )
    if failed:
        raise typer.Exit(1)


@app.command("time")
def take_times(
    experiment: Annotated[Path, typer.Argument(help="A TOML file, as in benchmarks/experiments.")],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only cells of this federation, data set, model, scenario or method; as in `bench run`."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, as 0-4 or 0,1,5; by default the experiment's first.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each cell, after one that is not timed.", min=3)] = 3,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly before so many minutes are over.", min=0)
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of results; each experiment has one below it.")] = _RESULTS,
    force: Annotated[bool, typer.Option("--force", help="Time again what has clean times already.")] = False,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Go on where the device is not idle; such times are marked, and count nowhere."),
    ] = False,
    note: Annotated[str | None, typer.Option(help="Kept with the times.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be timed, and stop.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, …")] = "auto",
) -> None:
    """Take clean times of finished cells: one process, an idle device, one warm-up, the median of three runs.

    Accuracies are not measured again; times go beside the results, in files of their own. A federation that is not in
    the cache is trained first, outside of what is timed. Clients come first, then classes; Retrain and FedUP first.

    Example: [bold]fedup bench time benchmarks/experiments/main.toml --only mnist --budget-minutes 10[/]
    """
    from fedup.bench.alone import look_once
    from fedup.bench.experiment import load_experiment
    from fedup.bench.results import Results
    from fedup.bench.runner import BudgetSpentError
    from fedup.bench.timing import finished, is_clean, time_cells, to_time
    from fedup.cli._session import checked_device
    from fedup.tasks.datasets import check_there

    asked, device = load_experiment(experiment), checked_device(device)
    cells = asked.cells(seeds=_parse_seeds(seeds) if seeds else asked.seeds[:1], only=only or ())
    store = Results(results / asked.name)
    there = finished(cells, store)
    missing = to_time(cells, store, device=device, force=force)
    for cell in missing:
        typer.echo(str(cell))
    typer.echo(
        f"{len(missing)} cells to time on {device}, each once to warm up and {repeats} times.\n"
        f"{len(there) - len(missing)} have clean times; {len(cells) - len(there)} have no figures and are left out."
    )
    if dry_run or not missing:
        return
    for name in sorted({cell.group.recipe.data for cell in missing}):
        check_there(name)
    state = look_once(device)
    if state.alone is not True and not shared:
        raise SettingError(
            f"The device is not idle ({state.others or 'nothing could be seen'}): a time that is taken now counts "
            "nowhere. End what else runs, or pass --shared to take times that are marked. Nothing was timed."
        )
    console = wide_console(stderr=True)
    clean = failed = 0
    with progress_bars(console) as show:
        try:
            for event in time_cells(
                missing,
                store,
                device=device,
                repeats=repeats,
                progress=show,
                budget_s=None if budget_minutes is None else 60 * budget_minutes,
                note=note,
            ):
                clean += is_clean(event.timing)
                failed += bool(event.error)
                said = f"failed: {event.error}" if event.error else f"{event.timing['median']['time']:.4g} s"
                mark = "" if event.error or is_clean(event.timing) else ", shared"
                line = f"[{event.done}/{event.total}] {event.cell}: {said}{mark}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        except BudgetSpentError:
            console.print("The time given is over; the same command goes on from here.", highlight=False)
    typer.echo(f"{clean} of {len(missing)} cells have clean times now, {failed} failed.\nNext: fedup bench report")
    if failed:
        raise typer.Exit(1)


@app.command()
def tune(
    method: Annotated[str, typer.Argument(help="A method whose file declares a GRID, or all of the experiment's.")],
    experiment: Annotated[Path, typer.Argument(help="A TOML file with `tuned = FOLDER`.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Only this federation, data set, model or scenario; repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed that is tuned with; by default one that no table uses.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Tune again where it was done already.")] = False,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, …")] = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Choose a method's settings for each federation and scenario of an experiment: on validation rows, from the grid
    that the method's file declares, with as many trials as any other method has.

    Choices and evidence go to FOLDER/METHOD.toml, and `fedup bench run` takes them from there.

    Example: [bold]fedup bench tune federaser benchmarks/experiments/baselines.toml --only mnist[/]

    Example: [bold]fedup bench tune all benchmarks/experiments/baselines.toml[/]
    """
    from fedup.bench.experiment import load_experiment
    from fedup.bench.tuned import load_tuned, save_tuned
    from fedup.bench.tuning import TUNING_SEED, tunable, tune_places
    from fedup.cli._session import checked_device
    from fedup.tasks.datasets import check_there

    asked = load_experiment(experiment)
    if asked.tuned_folder is None:
        raise SettingError(f"{experiment} does not say where choices go: add tuned = 'FOLDER', beside it or below.")
    methods = tunable(asked) if method == "all" else [method]
    paths = {name: asked.tuned_folder / f"{name}.toml" for name in methods}
    kept = {} if force else {name: load_tuned(path) for name, path in paths.items()}
    for name in sorted({cell.group.recipe.data for cell in asked.cells([0], only or ())}):
        check_there(name)
    with progress_bars(wide_console(stderr=True)) as show:
        for name, found in tune_places(
            methods,
            asked,
            only=only or (),
            leave_out=[(one.federation, one.scenario, name) for name, places in kept.items() for one in places],
            seed=TUNING_SEED if seed is None else seed,
            device=checked_device(device),
            progress=show,
        ):
            save_tuned(paths[name], name, asked.name, [found])
            best = max(trial.score for trial in found.tried)
            chosen = ", ".join(f"{key} = {value}" for key, value in found.settings.items())
            typer.echo(
                f"{found.federation}, {found.scenario}, {name}: {chosen} (score {best:.4f}; {len(found.tried)} tried)"
            )
    typer.echo(f"Choices and evidence: {asked.tuned_folder}. Next: fedup bench run {experiment}")


@app.command()
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
    from fedup.bench.tables import write_tables

    for path in write_tables(folder, experiments or (), results):
        typer.echo(f"wrote {path}")


@app.command()
def scale(
    clients: Annotated[str, typer.Option(help="Numbers of clients, as 10,100,1000.")] = "10,100,1000",
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/scale/this-machine.json"),
) -> None:
    """Messages, bytes, memory and time of federations of many small clients, in Flower's simulation engine.

    A thousand clients take some minutes on two cores. Needs the extra `flower`.

    Example: [bold]fedup bench scale --clients 10,100[/]
    """
    from fedup.bench.scale import run_scale
    from fedup.bench.scale_table import HEAD, measured_rows

    try:
        sizes = sorted({int(size) for size in clients.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"--clients: {clients} is no list of numbers, as 10,100.") from error
    if not sizes or sizes[0] < 2:
        raise typer.BadParameter("--clients: a federation has 2 clients or more.")
    console = wide_console()
    with progress_bars(console) as progress:
        result = run_scale(sizes, progress=progress)
    write_text(out, json.dumps(result, indent=2) + "\n")
    table = Table("", *(row[0] for row in measured_rows(result)), title="clients", title_justify="left")
    for name, *values in zip(HEAD[1:], *(row[1:] for row in measured_rows(result)), strict=True):
        table.add_row(name, *values)
    console.print(table)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)


@app.command()
def speed(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmarks/speed/this-machine.json"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part: training, growth, limits, extraction, clustering, serving; repeatable. Or precision, "
            "on demand only: it trains on real data for minutes."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda, cuda:1, …")] = "auto",
    rows: Annotated[int, typer.Option(help="Feature rows to cluster.", min=1000)] = 50_000,
    width: Annotated[int, typer.Option(help="Features per row.", min=32)] = 512,
    literal: Annotated[
        bool, typer.Option("--literal", help="Also run the paper's recipe taken literally: a minute or two, on a CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Training, growth with clients, feature reading, clustering, requests and serving, as ratios in one run.

    Example: [bold]fedup bench speed --out benchmarks/speed/my-machine.json[/]

    Example: [bold]fedup bench speed --only training --only growth --device cuda[/]
    """
    import torch

    from fedup.bench.speed import run_speed
    from fedup.bench.speed.table import cells, is_shared, title
    from fedup.cli._session import checked_device

    if out.is_dir():
        raise typer.BadParameter(f"--out: {out} is a folder; name a file.")
    console = wide_console(stderr=as_json)
    with progress_bars(console) as progress:
        result = run_speed(
            device=torch.device(checked_device(device)),
            progress=progress,
            parts=only or (),
            rows=rows,
            width=width,
            literal=literal,
        )
    write_text(out, json.dumps(result, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    table = Table(title=title(result), title_justify="left")
    for column in ("measured", "value", "goal", "met"):
        table.add_column(column, justify="left" if column == "measured" else "right")
    for row in result["table"]:
        *first, met = cells(row, shared=is_shared(result))
        table.add_row(*first, "[red]no" if met == "no" else met)
    console.print(table)
    console.print(f"Result: {out}", highlight=False, soft_wrap=True)


@app.command()
def core(
    data: Annotated[str, typer.Option(help="Data set: digits, or mnist below FEDUP_DATA.")] = "mnist",
    seeds: Annotated[str, typer.Option(help="Seeds, as 0-2 or 0,1,5.")] = "0-2",
    rounds: Annotated[int, typer.Option(help="Rounds of FedAvg.", min=1)] = 10,
    folder: Annotated[Path, typer.Option(help="Folder for the result files, one per seed.")] = Path(
        "benchmarks/results"
    ),
    force: Annotated[bool, typer.Option(help="Measure again what is there already.")] = False,
) -> None:
    """Class and flipped-client requests at 1× and 5× steps against Retrain; seeds already measured are skipped.

    Example: [bold]fedup bench core --data mnist --seeds 0-2[/]
    """
    from fedup.bench.core_figures import is_current, run_seed, summary_rows

    console = wide_console()
    results = []
    with progress_bars(console) as progress:
        for seed in _parse_seeds(seeds):
            path = folder / f"core-{data}-seed{seed}.json"
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not force else None
            if found is None or not is_current(found, rounds=rounds):
                found = run_seed(data, seed, rounds=rounds, progress=progress)
                write_text(path, json.dumps(found, indent=2) + "\n")
            results.append(found)
    table = Table(title=f"{data}, {len(results)} seeds", title_justify="left")
    for column in ("figure", "mean", "worst", "goal", "met", "n"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in summary_rows(results):
        table.add_row(*row)
    console.print(table)


def _parse_seeds(text: str) -> list[int]:
    seeds: dict[int, None] = {}  # each once, in order
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise SettingError(f"Seeds are given as 0-2 or 0,1,5; found {text!r}.")
        seeds |= dict.fromkeys(range(first, last + 1))
    return list(seeds)
