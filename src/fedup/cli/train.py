"""`fedup train`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli._complete import data_sets, models
from fedup.cli._options import (
    DEFAULT_RUN,
    DEFAULT_WAIT_S,
    DeviceOption,
    JsonOption,
    RunOption,
    ThreadsOption,
    WaitOption,
)

if TYPE_CHECKING:
    from fedup.tasks.recipe import Recipe
    from fedup.training.engines import EngineName


def train(
    run: RunOption = DEFAULT_RUN,
    data: Annotated[
        str,
        typer.Option(
            help="Data set: a name (`fedup list`), a .py file, or a folder or file of Parquet in the hub's layout.",
            autocompletion=data_sets,
        ),
    ] = "digits",
    model: Annotated[
        str | None, typer.Option(help="Model: a name (`fedup list`) or a .py file.", autocompletion=models)
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients in the federation.", min=2)] = 10,
    partition: Annotated[str, typer.Option(help="iid, dirichlet:0.5 or pathological:2.")] = "dirichlet:0.5",
    rows: Annotated[int | None, typer.Option(help="Use a random subset of so many rows.", min=1)] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of FedAvg; by default what the data set needs.", min=0)
    ] = None,
    epochs: Annotated[int, typer.Option(help="Local epochs in each round.", min=1)] = 1,
    batch_size: Annotated[int | None, typer.Option(help="Local batch size.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Local learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, or auto (bfloat16 on a GPU that has it); by default as the model says."),
    ] = None,
    clients_per_round: Annotated[
        int | None, typer.Option(help="Clients drawn in each round; by default all.", min=1)
    ] = None,
    cut: Annotated[
        str | None, typer.Option(help="Module whose input is filtered; by default the last linear layer.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Start from these weights (safetensors, or tinybert's folder); with --rounds 0 take them as trained."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same federation and model.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the rounds of an unfinished training.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    engine: Annotated[
        str, typer.Option(help="auto (what FEDUP_ENGINE says, else captured steps on a GPU), plain, captured.")
    ] = "auto",
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Make a run folder and train its federation; an interrupted training goes on where it was.

    Example: [bold]fedup train --data mnist --rounds 10 --run runs/mnist[/]
    """
    import torch

    from fedup.cli._session import checked_device
    from fedup.cli._text import of
    from fedup.tasks.recipe import Recipe
    from fedup.training.engines import known_engine

    asked = known_engine(engine, torch.device(checked_device(device)))
    recipe = Recipe.suited_to(
        data,
        model=model,
        clients=clients,
        partition=partition,
        rows=rows,
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        optimizer=optimizer,
        precision=precision,
        clients_per_round=clients_per_round,
        cut=cut,
        weights=str(weights) if weights else None,
        seed=seed,
    )
    if rounds == 0 and weights is None:
        raise typer.BadParameter("--rounds 0 takes a model as trained: bring its weights with --weights.")
    result = _train(run, recipe, restart, device, asked, wait)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif result["already"]:
        typer.echo(f"{run} was trained before; nothing was changed. Next: fedup collect{of(run)}")
    else:
        how = (
            f"{recipe.rounds} rounds, in {result['time_s']:.1f} s" if recipe.rounds else "weights as they were brought"
        )
        typer.echo(
            f"{recipe.model} on {recipe.data}: {recipe.clients} clients, {how}; held-out accuracy "
            f"{result['accuracy']['heldout']:.3f}.\n"
            f"Model {result['fingerprint'][:12]} is in {run}. Next: fedup collect{of(run)}"
        )


def _train(
    path: Path, recipe: "Recipe", restart: bool, device: str, engine: "EngineName", wait_s: float
) -> dict[str, Any]:
    from fedup.cli._busy import BusyNoted
    from fedup.cli._progress import progress_bars
    from fedup.cli._session import Session
    from fedup.models.cut import find_cut
    from fedup.models.views import fingerprint
    from fedup.run.record import keep_model
    from fedup.tasks.evaluation import accuracy
    from fedup.tasks.progress import RoundsShown

    session = Session(path, device=device)
    own = {
        name: Path(source)
        for name, source in (("data", recipe.data), ("model", recipe.model))
        if source.endswith(".py")
    }
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    about = recipe.about(dataset) | {"initial": fingerprint(start), "cut": find_cut(start, recipe.cut)}
    about |= {name: source.name for name, source in own.items()}  # the folder may move: no path of this machine
    session.run.start(about, code=own, restart=restart, wait_s=wait_s)
    with session.writing("train", wait_s) as writer:
        if writer.state.trained is not None:
            return {"already": True, **_told(writer.state.trained.body)}
        with progress_bars(session.console, line_for_each="round") as show:
            trained = recipe.train(
                start,
                federation,
                device=device,
                observers=[
                    BusyNoted(session.console),
                    RoundsShown(show, f"Training {recipe.model} on {recipe.data}", recipe.rounds),
                ],
                checkpoint=session.run.files.checkpoint,
                engine=engine,
            )
        rows = federation.rows("heldout")
        measured = {
            "heldout": accuracy(trained.model, federation.x[rows].to(device), federation.y[rows].to(device)),
            "test": accuracy(trained.model, dataset.test_x.to(device), dataset.test_y.to(device)),
        }
        trained.model.to("cpu")
        facts = {
            "data": federation.digest(),
            "rows": len(federation.rows("train")),
            "accuracy": {name: value for name, value in measured.items() if value == value},
            "time_s": trained.time_s,
            "engine": trained.engine,
            **session.facts,
        }
        facts["machine"] |= {"threads": trained.threads}
        body = keep_model(writer, trained.model, facts)
        return {"already": False, **_told(body)}


def _told(body: Any) -> dict[str, Any]:
    return {name: body[name] for name in ("fingerprint", "accuracy", "rows", "time_s")}
