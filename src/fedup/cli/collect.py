"""`fedup collect`."""

import json
from typing import Annotated, Any

import typer

from fedup.cli._options import (
    DEFAULT_RUN,
    DEFAULT_WAIT_S,
    DeviceOption,
    JsonOption,
    RunOption,
    ThreadsOption,
    WaitOption,
)


def collect(
    run: RunOption = DEFAULT_RUN,
    ratio: Annotated[
        float | None, typer.Option(help="Centroids per row of a cell, ρ in (0, 1]; 0.8 where it is not given.")
    ] = None,
    sigma: Annotated[
        float, typer.Option(help="The paper's Gaussian noise on each centroid, σ: noise only, not a DP guarantee.")
    ] = 0.0,
    paper_accounting: Annotated[
        bool, typer.Option("--paper-accounting", help="Count the paper's ε of that noise: not a DP guarantee either.")
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of a differential-privacy guarantee: noisy statistics, no centroids.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Its δ; 1e-5 where it is not given.")] = None,
    clip: Annotated[
        str | None,
        typer.Option(help="Under DP: the norm of a feature vector, a public number, or 'unit' to scale each to 1."),
    ] = None,
    allow_delta: Annotated[bool, typer.Option("--allow-delta", help="Allow a δ above 1e-5.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the clustering and of --sigma's noise.")] = 0,
    again: Annotated[
        bool, typer.Option("--again", help="Ask all clients anew; only while no request is in force.")
    ] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Ask every client, once, for the centroids of its classes; requests are answered from them later.

    Example: [bold]fedup collect --run runs/mnist --ratio 0.8[/]

    Example: [bold]fedup collect --run runs/mnist --epsilon 2 --clip unit[/]
    """
    from fedup.cli._session import Session
    from fedup.cli._text import of, size
    from fedup.errors import SettingError
    from fedup.privacy.guarantee import DP
    from fedup.privacy.paper import DISCLAIMER
    from fedup.statistics.centroids import CentroidConfig

    how: CentroidConfig | DP
    if epsilon is None:
        if clip is not None or delta is not None or allow_delta:
            raise SettingError("--clip, --delta and --allow-delta belong to a guarantee: pass --epsilon as well.")
        how = CentroidConfig(0.8 if ratio is None else ratio, sigma, seed, paper_accounting)
    elif ratio is not None:
        raise SettingError("Under --epsilon there are no centroids, and so no --ratio of them: leave it out.")
    elif sigma or paper_accounting:
        raise SettingError("--epsilon is a guarantee with its own noise: pass neither --sigma nor --paper-accounting.")
    else:
        how = DP(epsilon, DP.delta if delta is None else delta, _clip(clip), allow_delta=allow_delta)
    session = Session(run, device=device)
    with session.writing("collect", wait) as writer:
        known = writer.state.collected
        result = _already(known.body, how) if known and not again else _collect(session, writer, how)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif result["already"]:
        typer.echo(f"The centroids are in {run} already; nothing was changed. Next: fedup unlearn --class 0{of(run)}")
    else:
        counted = result["paper_epsilon"]
        told = f" The paper's ε, mean over cells: {counted:.2f} ({DISCLAIMER})." if counted is not None else ""
        kind = "vectors of noisy statistics" if epsilon is not None else "centroids"
        typer.echo(
            f"{result['centroids']:,} {kind} of {result['cells']} cells from {result['clients']} clients, "
            f"{size(result['bytes_up'])} sent, in {result['time_s']:.1f} s.\n"
            f"Protection: {result['mechanism']}.{told} Next: fedup unlearn --class 0{of(run)}"
        )


def _clip(text: str | None) -> Any:
    """A number where it is one; what it may be is said by the settings."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _already(body: Any, how: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from fedup.errors import SettingError
    from fedup.statistics.store import how_from

    if how_from(body["how"]) != how:
        raise SettingError(
            f"Centroids were collected with {_options(body['how'])} before, and {_options(asdict(how))} was asked for. "
            "Use those settings, or ask all clients anew with --again."
        )
    return {"already": True, **_told(body)}


def _options(how: dict[str, Any]) -> str:
    """Settings as options of the command; those that are not set are left out."""
    options = ("ratio", "sigma", "paper_accounting", "epsilon", "delta", "clip", "allow_delta", "seed")
    given = {name.replace("_", "-"): how[name] for name in options if how.get(name)}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())


def _collect(session: Any, writer: Any, how: Any) -> dict[str, Any]:
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
    waiting = [request.id for request in state.requests if request.is_active or request.is_open]
    if waiting:
        raise RequestError(
            f"Requests are in force or open ({', '.join(waiting)}): asking all clients anew would bring back what they "
            "forget. Take them back first."
        )
    model = load_base(session.run, state, session.blank(state))
    with progress_bars(session.console) as show:
        started = time.perf_counter()
        contact = ClientsShown(session.federation, model, show, "Collecting centroids", ledger=RunLedger(writer))
        asked = (
            {"privacy": how}
            if isinstance(how, DP)
            else {
                "ratio": how.ratio,
                "sigma": how.sigma,
                "seed": how.seed,
                "privacy": "paper" if how.paper_accounting else None,
            }
        )
        store = ask_clients(model, contact, cut=state.about["cut"], **asked)
        time_s = time.perf_counter() - started
    body = keep_centroids(writer, store, {"time_s": time_s, **session.facts})
    return {"already": False, **_told(body)}


def _told(body: Any) -> dict[str, Any]:
    return {
        "centroids": body["rows"],
        "width": body["width"],
        "cells": body["cells"],
        "clients": len({release["client"] for release in body["releases"]}),
        "bytes_up": body["bytes_up"],
        "bytes_down": body["bytes_down"],
        "mechanism": body["mechanism"],
        "how": body["how"],
        "paper_epsilon": body.get("paper_epsilon"),
        "time_s": body["time_s"],
    }
