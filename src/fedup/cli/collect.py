"""`fedup collect`."""

from typing import Annotated

import typer

from fedup.cli import _options as options
from fedup.cli._settings import Settings, with_settings


@with_settings(
    centroids="fedup.statistics.centroids.CentroidConfig",
    moments="fedup.statistics.integer_moments.MomentConfig",
    privacy="fedup.privacy.guarantee.DP",
)
def collect(
    run: options.RunOption = options.DEFAULT_RUN,
    *,
    statistics: Annotated[
        str,
        typer.Option(
            help="moments (integer sums, for the closed-form filter), centroids (the paper's way), or auto: moments "
            "where the cut is before a last linear layer."
        ),
    ] = "auto",
    centroids: Settings,
    moments: Settings,
    privacy: Settings,
    again: Annotated[
        bool, typer.Option("--again", help="Ask all clients anew; only while no request is in force.")
    ] = False,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Ask every client once for its moments or centroids, from which requests are answered.

    Examples:
    [bold]fedup collect --run runs/mnist[/]
    [bold]fedup collect --run runs/mnist --statistics centroids --ratio 0.8[/]
    [bold]fedup collect --run runs/mnist --epsilon 2 --clip unit[/]
    """
    from fedup.cli._collecting import collect_into, config_of, print_collected
    from fedup.cli._session import Session

    session = Session(run, device=device)
    if session.run.read().is_exact:
        text = "The head was learned from its clients' sums: there is nothing more to collect, and nothing was changed."
        options.show({"already": True}, as_json, lambda _: typer.echo(text))
        return
    config = config_of(statistics, centroids, moments, privacy)
    result = collect_into(session, config, again=again, wait_s=wait)
    options.show(result, as_json, lambda result: print_collected(result, run))
