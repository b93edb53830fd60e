"""`fedup train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._complete import data_sets, models
from fedup.cli._progress import progress_bars
from fedup.cli._settings import Settings, with_settings
from fedup.cli._text import of
from fedup.cli._wording import visible
from fedup.run.in_words import count
from fedup.target_words import SCORE

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.tasks.recipe import Recipe
    from fedup.training.engines import EngineName


@with_settings(settings="fedup.tasks.recipe.Recipe", file="fedup.tasks.file_options.FileOptions")
def train(
    run: options.RunOption = options.DEFAULT_RUN,
    data: Annotated[
        str,
        typer.Option(
            help="Data set: a name (`fedup list`), a .csv, .parquet or .npz file, a folder of images, or a .py file.",
            autocompletion=data_sets,
        ),
    ] = "digits",
    model: Annotated[str | None, typer.Option(help="A name (`fedup list`) or .py file.", autocompletion=models)] = None,
    *,
    settings: Settings,
    file: Settings,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Learn only a head, in one round, on this public backbone: random_conv, efficientnet_lite0, minilm, a "
            ".py file, or a Hugging Face folder. Forgetting is exact then.",
        ),
    ] = None,
    features: Annotated[
        int | None, typer.Option(help="So many features: projected, or random ones behind them.", min=1)
    ] = None,
    keep: Annotated[
        str, typer.Option(help="With --backbone: sums of all clients, or cohort (totals alone; leavers send theirs).")
    ] = "clients",
    weights: Annotated[
        Path | None,
        typer.Option(help="First weights (safetensors, or tinybert's folder); with --rounds 0, the trained ones."),
    ] = None,
    subject_key: options.SubjectKeyOption = None,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the rounds of an unfinished training.")] = False,
    more_rounds: Annotated[
        int | None,
        typer.Option(help="Train the served model on for so many rounds, without what was forgotten.", min=1),
    ] = None,
    max_loss: options.MaxLossOption = 3.0,
    max_class_loss: options.MaxClassLossOption = 5.0,
    force: options.ForceOption = False,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    engine: Annotated[
        str, typer.Option(help="auto (what FEDUP_ENGINE says, else captured steps on a GPU), plain, captured.")
    ] = "auto",
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Make a run folder and train its model; run it again to go on after an interruption.

    With --more-rounds a trained folder trains on by its own recipe. Rows of all requests are left out. Statistics and
    filter are made anew for the new base, and the requests in force follow. Until then the old base serves.

    Examples:
    [bold]fedup train --data mnist --rounds 10 --run runs/mnist[/]
    [bold]fedup train --data patients.csv --label diagnosis --clients-column hospital[/]
    [bold]fedup train --data my_data.py --model my_model.py[/]
    [bold]fedup train --data digits --backbone random_conv[/]
    [bold]fedup train --more-rounds 5 --run runs/mnist[/]
    """
    import torch

    from fedup.cli._more_rounds import go_on, print_trained_on
    from fedup.cli._remark import remark
    from fedup.cli._session import Session
    from fedup.cli._tables import columns_in_words, options_from
    from fedup.run.limits import Limits
    from fedup.tasks.recipe import Recipe
    from fedup.training.engines import known_engine

    session = Session(run, device=device, subject_key=subject_key)
    if more_rounds is not None:
        given: dict[str, Any] = {**settings, **file, "model": model, "backbone": backbone, "weights": weights}
        given |= {"data": data if data != "digits" else None, "features": features, "restart": restart or None}
        result = go_on(session, given, more_rounds, Limits(max_loss, force, max_class_loss), engine, wait)
        options.show(result, as_json, lambda result: print_trained_on(result, run))
        raise typer.Exit(1 if result["declined"] else 0)
    if backbone is not None:
        from fedup.cli._exact import known_keep, learn_into, print_learned

        recipe = _recipe_of_head(data, {**settings, "model": model, "weights": weights}, file)
        result = learn_into(session, recipe, backbone, features, known_keep(keep), wait)
        options.show(result, as_json, lambda result: print_learned(result, run))
        return
    if keep != "clients":
        raise typer.BadParameter("--keep is for a head on a public backbone: name one with --backbone.")
    chosen_engine = known_engine(engine, torch.device(session.device))
    first = str(weights) if weights else None
    recipe = Recipe.suited_to(data, model=model, weights=first, file=options_from(file), **settings)
    if recipe.rounds == 0 and weights is None:
        raise typer.BadParameter("--rounds 0 takes a model as trained: bring its weights with --weights.")
    result = _train(session, recipe, restart, chosen_engine, wait)
    said = f"{run} was trained before; nothing was changed."
    if not result["already"]:
        notes = remark(result) + columns_in_words(recipe.data, recipe.file)
        rounds = f"{count(recipe.rounds, 'round')}, in {result['time_s']:.1f} s"
        said = (
            f"{recipe.model} on {recipe.data}: {recipe.clients} clients, "
            f"{rounds if recipe.rounds else 'weights as they were brought'}; held-out {result['score']} "
            f"{result['accuracy']['heldout']:.3f}.\n{notes}Model {result['fingerprint'][:12]} is in {run}."
        )
    options.show(result, as_json, lambda _: typer.echo(visible(f"{said} Next: fedup collect{of(run)}")))


def _recipe_of_head(data: str, given: dict[str, Any], file: Settings) -> "Recipe":
    """Who the clients are; settings of training in rounds are refused."""
    from fedup.cli._tables import options_from, public_scaling
    from fedup.tasks.recipe import Recipe

    chosen = {name: value for name, value in given.items() if value is not None}
    if others := sorted(chosen.keys() - {"clients", "partition", "rows", "seed"}):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise typer.BadParameter(f"--backbone learns a head in one round, in closed form: leave out {named}.")
    return Recipe.suited_to(data, file=public_scaling(data, options_from(file)), **{**chosen, "rounds": 1})


def _train(session: "Session", recipe: "Recipe", restart: bool, engine: "EngineName", wait_s: float) -> dict[str, Any]:
    from fedup.cli._new_base import facts_of
    from fedup.cli._session import BusyNoted
    from fedup.models.cut import find_cut
    from fedup.models.views import fingerprint
    from fedup.run.record import keep_model
    from fedup.tasks.progress import RoundsShown
    from fedup.training.fedavg import Runtime

    parts = {"data": recipe.data, "model": recipe.model}
    own = {name: Path(source) for name, source in parts.items() if source.endswith(".py")}
    dataset = recipe.load()
    key = session.key_for(dataset)
    federation = recipe.federation(dataset, key)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    about = recipe.about(dataset) | {"initial": fingerprint(start), "cut": find_cut(start, recipe.cut)}
    about |= {name: source.name for name, source in own.items()}  # the folder may move: no path of this machine
    about |= {} if key is None else {"subject_key": key.fingerprint}
    session.run.start(about, code=own, restart=restart, wait_s=wait_s)
    session.keep_key(key)
    with session.writing("train", wait_s) as writer:
        if writer.state.trained is not None:
            return {"already": True, **_describe(writer.state.trained.body)}
        with progress_bars(session.console, line_for_each="round") as show:
            rounds = RoundsShown(show, f"Training {recipe.model} on {recipe.data}", recipe.rounds)
            trained = recipe.train(
                start,
                federation,
                observers=[BusyNoted(session.console), rounds],
                runtime=Runtime(session.device, engine, session.run.files.checkpoint),
            )
        facts = {"data": federation.digest(), **facts_of(session, trained, federation, dataset)}
        trained.model.to("cpu")
        return {"already": False, **_describe(keep_model(writer, trained.model, facts))}


def _describe(body: Any) -> dict[str, Any]:
    shown = ("fingerprint", "accuracy", "rows", "time_s", "constant_score")
    described = {name: body[name] for name in shown if name in body}
    return {**described, "score": body.get("score", SCORE["classes"])}
