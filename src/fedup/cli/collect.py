"""`fedup collect`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedup.cli import _options as options
from fedup.cli._settings import Settings, with_settings

if TYPE_CHECKING:
    from fedup.cli._session import Session
    from fedup.privacy.guarantee import DP
    from fedup.run.folder import Writer
    from fedup.statistics.centroids import CentroidConfig


@with_settings(centroids="fedup.statistics.centroids.CentroidConfig", privacy="fedup.privacy.guarantee.DP")
def collect(
    run: options.RunOption = options.DEFAULT_RUN,
    *,
    centroids: Settings,
    privacy: Settings,
    again: Annotated[
        bool, typer.Option("--again", help="Ask all clients anew; only while no request is in force.")
    ] = False,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    wait: options.WaitOption = options.DEFAULT_WAIT_S,
    as_json: options.JsonOption = False,
) -> None:
    """Ask every client, once, for the centroids of its classes; requests are answered from them later.

    Example: [bold]fedup collect --run runs/mnist --ratio 0.8[/]

    Example: [bold]fedup collect --run runs/mnist --epsilon 2 --clip unit[/]
    """
    from fedup.cli._session import Session
    from fedup.cli._text import of, size
    from fedup.privacy.paper import DISCLAIMER

    config = _config(centroids, privacy)
    session = Session(run, device=device)
    with session.writing("collect", wait) as writer:
        known = writer.state.collected
        result = _already(known.body, config) if known and not again else _collect(session, writer, config)

    next_step = f"Next: fedup unlearn --class 0{of(run)}"

    def show(result: dict[str, Any]) -> None:
        if result["already"]:
            typer.echo(f"The centroids are in {run} already; nothing was changed. {next_step}")
            return
        counted = result["paper_epsilon"]
        told = f" The paper's ε, mean over cells: {counted:.2f} ({DISCLAIMER})." if counted is not None else ""
        kind = "vectors of noisy statistics" if privacy else "centroids"
        typer.echo(
            f"{result['centroids']:,} {kind} of {result['cells']} cells from {result['clients']} clients, "
            f"{size(result['bytes_up'])} sent, in {result['time_s']:.1f} s.\n"
            f"Protection: {result['mechanism']}.{told} {next_step}"
        )

    options.show(result, as_json, show)


def _config(centroids: Settings, privacy: Settings) -> "CentroidConfig | DP":
    """Centroids, with the paper's noise or without; or statistics under a guarantee."""
    from contextlib import suppress

    from fedup.errors import SettingError
    from fedup.privacy.guarantee import DP
    from fedup.statistics.centroids import CentroidConfig

    if "epsilon" not in privacy:
        if privacy:
            raise SettingError("--clip, --delta and --allow-delta belong to a guarantee: pass --epsilon as well.")
        return CentroidConfig(**centroids)
    if "ratio" in centroids:
        raise SettingError("Under --epsilon there are no centroids, and so no --ratio of them: leave it out.")
    if centroids.get("sigma") or "paper_accounting" in centroids:
        raise SettingError("--epsilon is a guarantee with its own noise: pass neither --sigma nor --paper-accounting.")
    with suppress(KeyError, ValueError):  # what it may be besides a number, the guarantee says
        privacy = {**privacy, "clip": float(privacy["clip"])}
    return DP(**privacy)


def _already(body: Any, config: "CentroidConfig | DP") -> dict[str, Any]:
    from dataclasses import asdict

    from fedup.errors import SettingError
    from fedup.statistics.store import how_from

    if how_from(body["how"]) != config:
        raise SettingError(
            f"Centroids were collected with {_as_options(body['how'])} before, and {_as_options(asdict(config))} was "
            "asked for. Use those settings, or ask all clients anew with --again."
        )
    return {"already": True, **_describe(body)}


def _as_options(settings: Settings) -> str:
    """Settings as options of the command; those that are not set are left out."""
    names = ("ratio", "sigma", "paper_accounting", "epsilon", "delta", "clip", "allow_delta", "seed")
    given = {name.replace("_", "-"): settings[name] for name in names if settings.get(name)}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())


def _collect(session: "Session", writer: "Writer", config: "CentroidConfig | DP") -> dict[str, Any]:
    import time

    from fedup.cli._progress import progress_bars
    from fedup.clients.collect import collect as ask_clients
    from fedup.errors import RequestError
    from fedup.privacy.guarantee import DP
    from fedup.run.ledger import RunLedger
    from fedup.run.record import keep_centroids
    from fedup.run.serving import load_base
    from fedup.tasks.progress import ClientsShown

    state = writer.state
    waiting = [request.id for request in state.requests if request.restored_in is None]
    if waiting:
        raise RequestError(
            f"Requests are in force or open ({', '.join(waiting)}): asking all clients anew would bring back what they "
            "forget. Take them back first."
        )
    model = load_base(session.run, state, session.blank(state))
    with progress_bars(session.console) as show:
        started = time.perf_counter()
        contact = ClientsShown(session.federation, model, show, "Collecting centroids", ledger=RunLedger(writer))
        settings: dict[str, Any] = {"privacy": config}
        if not isinstance(config, DP):
            privacy = "paper" if config.paper_accounting else None
            settings = {"ratio": config.ratio, "sigma": config.sigma, "seed": config.seed, "privacy": privacy}
        store = ask_clients(model, contact, cut=state.about["cut"], **settings)
        time_s = time.perf_counter() - started
    body = keep_centroids(writer, store, {"time_s": time_s, **session.facts})
    return {"already": False, **_describe(body)}


def _describe(body: Any) -> dict[str, Any]:
    names = ("width", "cells", "bytes_up", "bytes_down", "mechanism", "how", "paper_epsilon", "time_s")
    clients = len({release["client"] for release in body["releases"]})
    return {"centroids": body["rows"], "clients": clients, **{name: body[name] for name in names}}
