"""`fedup retrain`."""

from pathlib import Path
from typing import Annotated

import typer

from fedup.cli import _options as options


def retrain(
    run: options.RunOption = options.DEFAULT_RUN,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")] = False,
    max_loss: Annotated[
        float,
        typer.Option(help="Refuse a model that costs more points of accuracy on retained validation rows.", min=0),
    ] = 3.0,
    max_class_loss: Annotated[
        float, typer.Option(help="Refuse a model that costs a class nobody asked to forget more points.", min=0)
    ] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Put the model in place whatever it costs.")] = False,
    weights: Annotated[
        Path | None, typer.Option(help="First weights, where the training started from weights that were brought.")
    ] = None,
    subject_key: options.SubjectKeyOption = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    engine: Annotated[str, typer.Option(help="As in `fedup train`: auto, plain, captured.")] = "auto",
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Finish requests: train anew without what they forget, and put that model in place.

    A filter suppresses; the weights still hold it. The new model is trained by the folder's own recipe without the rows
    of all requests, and compared with the one that is served. Then one step puts it in place: filter, statistics and
    what was sealed are dropped, and the requests are finished. They cannot be taken back any more.
    Until that step the folder serves what it serves. Interrupted, the same command goes on where it was.

    Examples:
    [bold]fedup retrain --run runs/mnist --dry-run[/]
    [bold]fedup retrain --run runs/mnist[/]
    """
    import torch

    from fedup.cli._retraining import Retraining, plan_retraining, print_retrained, retrain_into
    from fedup.cli._session import Session
    from fedup.run.limits import Limits
    from fedup.training.engines import known_engine

    session = Session(run, device=device, subject_key=subject_key)
    limits = Limits(max_loss, force, max_class_loss)
    if dry_run:
        result = plan_retraining(session, weights)
    else:
        chosen = known_engine(engine, torch.device(session.device))
        result = retrain_into(session, Retraining(limits, chosen, wait, weights))
    options.show(result, as_json, lambda result: print_retrained(result, run))
    if result.get("declined"):
        raise typer.Exit(1)
