"""`fedup bench tune`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._options import ThreadsOption
from fedup.cli._progress import progress_bars, wide_console
from fedup.cli.bench._shared import BudgetOption, DeviceOption, check_data, until_time_is_over
from fedup.errors import SettingError


def tune(
    method: Annotated[
        str, typer.Argument(help="A method whose file declares a GRID, all of the experiment's, or recipe.")
    ],
    experiment: Annotated[
        Path, typer.Argument(help="A TOML file with `tuned = FOLDER`, or for recipe with candidates.")
    ],
    only: Annotated[list[str] | None, typer.Option(help="Federation, data set, model or scenario; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed to tune with; by default one that no table uses.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Tune again where it was done already.")] = False,
    budget_minutes: BudgetOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Choose a method's settings for each federation and scenario of an experiment: on validation rows, from the grid
    that the method's file declares, with as many trials as any other method has.

    Choices and evidence go to FOLDER/METHOD.toml, and `fedup bench run` takes them from there.

    Example: [bold]fedup bench tune federaser benchmarks/experiments/baselines.toml --only mnist[/]

    `recipe` chooses instead how a federation trains, from the candidates in a file: one recipe for all methods.

    Example: [bold]fedup bench tune all benchmarks/experiments/baselines.toml[/]

    Example: [bold]fedup bench tune recipe benchmarks/experiments/paper/recipes/vit.toml --budget-minutes 10[/]
    """
    if method == "recipe":
        _tune_recipe(experiment, budget_minutes, device)
        return
    from fedup.bench.experiment import load_experiment
    from fedup.bench.runner import within
    from fedup.bench.tuned import load_tuned, save_tuned
    from fedup.bench.tuning import TUNING_SEED, tunable, tune_places
    from fedup.cli._session import checked_device

    loaded = load_experiment(experiment)
    if loaded.tuned_folder is None:
        raise SettingError(f"{experiment} does not say where choices go: add tuned = 'FOLDER', beside it or below.")
    folder = experiment.resolve().parent
    source = f"{folder.name}/{loaded.name}" if folder.parent.name == "experiments" else loaded.name
    methods = tunable(loaded) if method == "all" else [method]
    paths = {name: loaded.tuned_folder / f"{name}.toml" for name in methods}
    kept = {} if force else {name: load_tuned(path) for name, path in paths.items()}
    check_data(loaded.cells([0], only or ()))
    console, budget_s = wide_console(stderr=True), budget_minutes and 60 * budget_minutes
    with progress_bars(console) as show, until_time_is_over(console):
        for name, choice in tune_places(
            methods,
            loaded,
            only=only or (),
            leave_out=[(place.federation, place.scenario, name) for name, places in kept.items() for place in places],
            seed=TUNING_SEED if seed is None else seed,
            device=checked_device(device),
            progress=within(budget_s, show),
        ):
            save_tuned(paths[name], name, source, [choice])
            best = max(trial.score for trial in choice.tried)
            settings = ", ".join(f"{key} = {value}" for key, value in choice.settings.items())
            place = f"{choice.federation}, {choice.scenario}, {name}"
            typer.echo(f"{place}: {settings} (score {best:.4f}; {len(choice.tried)} tried)")
    typer.echo(f"Choices and evidence: {loaded.tuned_folder}. Next: fedup bench run {experiment}")


def _tune_recipe(file: Path, budget_minutes: float | None, device: str) -> None:
    from fedup.bench.recipes import load_candidates, tune_recipe
    from fedup.cli._session import checked_device
    from fedup.tasks.datasets import check_there

    candidates, console = load_candidates(file), wide_console(stderr=True)
    check_there(candidates.recipe.data)
    budget_s, where = budget_minutes and 60 * budget_minutes, checked_device(device)
    with progress_bars(console) as show, until_time_is_over(console):
        for trial in tune_recipe(candidates, file.as_posix(), device=where, progress=show, budget_s=budget_s):
            typer.echo(f"{trial['name']}: accuracy {trial['accuracy']:.4f} on validation rows, {trial['time_s']:.0f} s")
    typer.echo(f"Choice and evidence: {candidates.file}.")
