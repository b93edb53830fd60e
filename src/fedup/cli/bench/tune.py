"""`fedup bench tune`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._options import ThreadsOption
from fedup.cli._progress import progress_bars, wide_console
from fedup.cli.bench._shared import DeviceOption, check_data
from fedup.errors import SettingError


def tune(
    method: Annotated[str, typer.Argument(help="A method whose file declares a GRID, or all of the experiment's.")],
    experiment: Annotated[Path, typer.Argument(help="A TOML file with `tuned = FOLDER`.")],
    only: Annotated[list[str] | None, typer.Option(help="Federation, data set, model or scenario; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed to tune with; by default one that no table uses.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Tune again where it was done already.")] = False,
    device: DeviceOption = "auto",
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

    loaded = load_experiment(experiment)
    if loaded.tuned_folder is None:
        raise SettingError(f"{experiment} does not say where choices go: add tuned = 'FOLDER', beside it or below.")
    methods = tunable(loaded) if method == "all" else [method]
    paths = {name: loaded.tuned_folder / f"{name}.toml" for name in methods}
    kept = {} if force else {name: load_tuned(path) for name, path in paths.items()}
    check_data(loaded.cells([0], only or ()))
    with progress_bars(wide_console(stderr=True)) as show:
        for name, choice in tune_places(
            methods,
            loaded,
            only=only or (),
            leave_out=[(place.federation, place.scenario, name) for name, places in kept.items() for place in places],
            seed=TUNING_SEED if seed is None else seed,
            device=checked_device(device),
            progress=show,
        ):
            save_tuned(paths[name], name, loaded.name, [choice])
            best = max(trial.score for trial in choice.tried)
            settings = ", ".join(f"{key} = {value}" for key, value in choice.settings.items())
            place = f"{choice.federation}, {choice.scenario}, {name}"
            typer.echo(f"{place}: {settings} (score {best:.4f}; {len(choice.tried)} tried)")
    typer.echo(f"Choices and evidence: {loaded.tuned_folder}. Next: fedup bench run {experiment}")
