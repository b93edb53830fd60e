"""`fedup bench exact`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedup.cli._options import JsonOption
from fedup.cli._progress import wide_console
from fedup.cli.bench._shared import RESULTS, measure_into


def exact(
    data: Annotated[str, typer.Option(help="Data set (`fedup list`).")] = "digits",
    backbone: Annotated[str, typer.Option(help="random_conv, efficientnet_lite0, minilm, or one of your own.")] = (
        "random_conv"
    ),
    rows: Annotated[int | None, typer.Option(help="Random training rows; by default all.", min=100)] = None,
    test_rows: Annotated[int | None, typer.Option(help="Random rows of the test set; by default all.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same clients and rows.")] = 0,
    fine_tune: Annotated[
        int, typer.Option(help="Compare with so many rounds of FedAvg on the whole backbone; they take long.", min=0)
    ] = 0,
    features: Annotated[
        int | None, typer.Option(help="So many features, made from the backbone's own by a public seed.", min=1)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for features, which an interrupted run goes on from.", envvar="FEDUP_FEATURES"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file; by default in benchmarks/results/exact.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure exact mode: one round of learning, requests, backdoors and public projections.

    Features are computed once and kept: 60,000 images at 224 pixels take hours on a core.

    Example: [bold]fedup bench exact --data cifar10 --backbone efficientnet_lite0 --rows 5000 --test-rows 1000[/]
    """
    from fedup.bench.exact import ExactCase, run_exact
    from fedup.tasks.datasets._cache import cache_folder

    folder = cache or cache_folder() / "features"
    made = f"-{features}_features" if features else ""
    path = out or RESULTS / "exact" / f"{Path(data).stem}-{Path(backbone).stem}{made}.json"
    case = ExactCase(data, backbone, rows, test_rows, seed, features)
    run = partial(run_exact, case, folder=folder, fine_tune=fine_tune)
    content = measure_into(path, run, as_json=as_json)
    if as_json:
        return
    learned, flipping, console = content["learned"], content["flipping"], wide_console()
    shares = [f"{flipping[state]['accuracy']:.3f}" for state in ("with", "forgotten", "learned_without")]
    console.print(
        f"{data} with {backbone}, {content['rows']:,} rows: {learned['accuracy']:.3f} after one round. With a lying "
        f"client {shares[0]}, forgotten {shares[1]}, learned without {shares[2]}; totals "
        f"{'equal' if flipping['equal'] else 'DIFFERENT'}. A client request takes {1000 * learned['request_s']:.0f} ms."
        f"\nResult: {path}. Next: fedup bench report",
        highlight=False,
        soft_wrap=True,
    )
