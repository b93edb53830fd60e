"""`fedup collect`."""

import json
from typing import Annotated, Any

import typer

from fedup.cli._options import DEFAULT_RUN, DEFAULT_WAIT_S, DeviceOption, JsonOption, RunOption, WaitOption


def collect(
    run: RunOption = DEFAULT_RUN,
    ratio: Annotated[float, typer.Option(help="Centroids per row of a cell, ρ in (0, 1].")] = 0.8,
    sigma: Annotated[float, typer.Option(help="Gaussian noise on each centroid (no DP guarantee), σ.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the clustering and the noise.")] = 0,
    again: Annotated[
        bool, typer.Option("--again", help="Ask all clients anew; only while no request is in force.")
    ] = False,
    device: DeviceOption = "cpu",
    wait: WaitOption = DEFAULT_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Ask every client, once, for the centroids of its classes; requests are answered from them later.

    Example: [bold]fedup collect --run runs/mnist --ratio 0.8[/]
    """
    from fedup.cli._session import Session
    from fedup.cli._text import of, size
    from fedup.client import Summarizing

    how = Summarizing(ratio, sigma, seed)
    session = Session(run, device=device)
    with session.writing("collect", wait) as writer:
        known = writer.state.collected
        result = _already(known.body, how) if known and not again else _collect(session, writer, how)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif result["already"]:
        typer.echo(f"The centroids are in {run} already; nothing was changed. Next: fedup unlearn --class 0{of(run)}")
    else:
        typer.echo(
            f"{result['centroids']:,} centroids of {result['cells']} cells from {result['clients']} clients, "
            f"{size(result['bytes_up'])} sent, in {result['time_s']:.1f} s.\n"
            f"Protection: {result['mechanism']}. Next: fedup unlearn --class 0{of(run)}"
        )


def _already(body: Any, how: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from fedup.errors import SettingError

    if body["how"] != asdict(how):
        raise SettingError(
            f"Centroids were collected with {body['how']} before, and {asdict(how)} was asked for. Use those settings, "
            "or ask all clients anew with --again."
        )
    return {"already": True, **_told(body)}


def _collect(session: Any, writer: Any, how: Any) -> dict[str, Any]:
    import time
    from dataclasses import asdict

    from fedup.bench.watching import ClientsShown
    from fedup.centroids import collect as ask_clients
    from fedup.centroids import save_centroids
    from fedup.cli._progress import progress_bars
    from fedup.errors import RequestError
    from fedup.report import Release
    from fedup.run.answering import describe_releases
    from fedup.run.serving import load_base

    state = writer.state
    if state.active:
        raise RequestError(
            f"Requests are in force ({', '.join(request.id for request in state.active)}): asking all clients anew "
            "would bring back what they forget. Take them back first."
        )
    model = load_base(session.run, state, session.blank(state))
    with progress_bars(session.console) as show:
        started = time.perf_counter()
        contact = ClientsShown(session.federation, model, show, "Collecting centroids")
        store = ask_clients(model, contact, ratio=how.ratio, sigma=how.sigma, seed=how.seed, cut=state.about["cut"])
        time_s = time.perf_counter() - started
    cells = {client: sum(cell.client == client for cell in store.cells) for client in store.bytes_up}
    sent = [Release(client, cells[client], size) for client, size in store.bytes_up.items()]
    body = {
        "centroids": writer.put("centroids", lambda path: save_centroids(store, path)).to_json(),
        "how": asdict(how),
        "rows": len(store.vectors),
        "width": store.vectors.shape[1],
        "cells": len(store.cells),
        "releases": describe_releases(sent, how),
        "time_s": time_s,
        **session.facts,
    }
    writer.commit("collected", body)
    return {"already": False, **_told(body)}


def _told(body: Any) -> dict[str, Any]:
    return {
        "centroids": body["rows"],
        "width": body["width"],
        "cells": body["cells"],
        "clients": len(body["releases"]),
        "bytes_up": sum(release["bytes"] for release in body["releases"]),
        "mechanism": body["releases"][0]["mechanism"] if body["releases"] else "none",
        "how": body["how"],
        "time_s": body["time_s"],
    }
