"""What `fedup collect` does: check settings, ask clients, and store what they send."""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import typer
from torch import nn

from fedup.cli._progress import progress_bars
from fedup.cli._session import Session
from fedup.cli._settings import Settings
from fedup.cli._text import of, size
from fedup.clients.collect import collect_cells
from fedup.clients.collect_moments import suits_moments
from fedup.errors import RequestError, SettingError, check_choice
from fedup.federation import Federation
from fedup.privacy.guarantee import DP
from fedup.privacy.paper import DISCLAIMER
from fedup.run.folder import Writer
from fedup.run.ledger import RunLedger
from fedup.run.record import keep_centroids
from fedup.run.serving import load_base
from fedup.run.state import State
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.store import Centroids
from fedup.statistics.store_file import how_from
from fedup.tasks.progress import ClientsShown

Config = CentroidConfig | MomentConfig | DP


def config_of(statistics: str, centroids: Settings, moments: Settings, privacy: Settings) -> Config | None:
    """Settings of centroids, with the paper's noise or without; of moments; or of statistics under a guarantee. None if
    the model decides."""
    check_choice("--statistics", statistics, Literal["auto", "centroids", "moments"])
    if statistics == "auto":
        if not (moments or centroids or privacy):
            return None
        statistics = "moments" if moments else "centroids"
    others = {"centroids": moments, "moments": {**centroids, **privacy}}[statistics]
    if others:
        name = next(iter(others)).replace("_", "-")
        raise SettingError(f"--{name} does not go with --statistics {statistics}: leave it out.")
    if statistics == "moments":
        return MomentConfig(**moments)
    if "epsilon" not in privacy:
        if privacy:
            raise SettingError("--clip, --delta and --allow-delta belong to a guarantee: pass --epsilon as well.")
        return CentroidConfig(**centroids)
    for name in [name for name in ("ratio", "seed") if name in centroids]:
        raise SettingError(f"--{name} is for centroids, and under --epsilon there are none: leave it out.")
    if centroids.get("sigma") or "paper_accounting" in centroids:
        raise SettingError("--epsilon is a guarantee with its own noise: pass neither --sigma nor --paper-accounting.")
    with suppress(KeyError, ValueError):  # DP checks what else it may be
        privacy = {**privacy, "clip": float(privacy["clip"])}
    return DP(**privacy)


def collect_into(session: Session, config: Config | None, *, again: bool, wait_s: float) -> dict[str, Any]:
    """Ask all clients and store what they send; where that was done before with the same settings, only describe it."""
    with session.writing("collect", wait_s) as writer:
        known = writer.state.collected
        return _already(known.body, config) if known and not again else _collect(session, writer, config)


def print_collected(result: dict[str, Any], run: Path) -> None:
    """What was collected, and its protection."""
    named = "client" if result["how"].get("targets") == "values" else "class"
    next_step = f"Next: fedup unlearn --{named} 0{of(run)}"
    if result["already"]:
        typer.echo(f"The clients' statistics are in {run} already; nothing was changed. {next_step}")
        return
    epsilon = result["paper_epsilon"]
    paper = f" The paper's ε, mean over cells: {epsilon:.2f} ({DISCLAIMER})." if epsilon is not None else ""
    kinds = {"epsilon": f"{result['centroids']:,} vectors of noisy statistics", "bound": "Sums and second moments"}
    kind = next((kind for name, kind in kinds.items() if name in result["how"]), f"{result['centroids']:,} centroids")
    typer.echo(
        f"{kind} of {result['cells']} cells from {result['clients']} clients, "
        f"{size(result['bytes_up'])} sent, in {result['time_s']:.1f} s.\n"
        f"{_left_out(result)}Protection: {result['mechanism']}.{paper} {next_step}"
    )


def _left_out(result: dict[str, Any]) -> str:
    """What moments do not tell, where clients sent some."""
    shortened, few = result.get("shortened"), result.get("unreported")
    text = f"{shortened:,} rows of features were longer than the bound and shortened.\n" if shortened else ""
    if clipped := result.get("clipped"):
        text += f"{clipped:,} rows have values beyond --value-bound, and were cut off there.\n"
    return text + (f"{few:,} rows are left out: too few of their class at their client.\n" if few else "")


def _already(body: Any, config: Config | None) -> dict[str, Any]:
    before = how_from(body["how"])
    if config is None:
        config = before
    if isinstance(before, MomentConfig) and isinstance(config, MomentConfig):
        config = config.adapted_as(before)
    if before != config:
        raise SettingError(
            f"Statistics were collected with {_as_options(body['how'])} before, and {_as_options(asdict(config))} was "
            "asked for. Use those settings, or ask all clients anew with --again."
        )
    return {"already": True, **_describe(body)}


def _as_options(settings: Settings) -> str:
    """Settings as options of the command, without those that are not set."""
    names = ["ratio", "sigma", "paper_accounting", "epsilon", "delta", "clip", "allow_delta", "seed"]
    if "bound" in settings:
        names = ["statistics", *(name for name in settings if name not in ("targets", "outputs"))]
        settings = {"statistics": "moments", **settings}
    given = {name.replace("_", "-"): settings[name] for name in names if settings.get(name)}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())


def last_config(state: State) -> Config | None:
    """The settings of the last collection as they were chosen; None if the model decides, or nobody collected."""
    for event in reversed(state.events):
        collected = event.body if event.kind == "collected" else event.body.get("collected")
        if collected is not None:
            chosen = collected.get("chosen", collected["how"])
            return None if chosen is None else how_from(dict(chosen))
    return None


def _collect(session: Session, writer: Writer, config: Config | None) -> dict[str, Any]:
    state = writer.state
    waiting = [request.id for request in state.requests if request.is_standing]
    if waiting:
        raise RequestError(
            f"Requests are in force or open ({', '.join(waiting)}): asking all clients anew would bring back what they "
            "forget. Take them back first."
        )
    model = load_base(session.run, state, session.blank(state))
    chosen = config or last_config(state)  # a base that was trained anew keeps the protection of the one before
    store, facts = ask_clients(session, writer, model, chosen)
    if isinstance(chosen, DP) and state.about.get("input", {}).get("standardise") == "clients":
        session.console.print(
            "Note: the constants that scale this table come from sums without noise, which --epsilon does not cover. "
            "Train with --standardise FILE for public constants.",
            markup=False,
            soft_wrap=True,
        )
    body = keep_centroids(writer, store, facts)
    return {"already": False, **_describe(body)}


def ask_clients(
    session: Session, writer: Writer, model: nn.Module, config: Config | None, federation: Federation | None = None
) -> tuple[Centroids, dict[str, Any]]:
    """What all clients send of this model, and what the journal notes besides; of all their rows, or of those of a
    `federation` without some."""
    cut = writer.state.about["cut"]
    chosen = None if config is None else asdict(config)
    with progress_bars(session.console) as show:
        started = time.perf_counter()
        federation = federation or session.federation
        if config is None:
            suits = federation.targets != "classes" or suits_moments(model, federation, cut)
            config = MomentConfig() if suits else CentroidConfig()
        moments, ledger = isinstance(config, MomentConfig), RunLedger(writer)
        contact = ClientsShown(federation, model, show, "Collecting statistics", moments=moments, ledger=ledger)
        store = collect_cells(model, contact, config, cut, frozenset(), with_forgotten=False)
    return store, {"time_s": time.perf_counter() - started, "chosen": chosen, **session.facts}


def _describe(body: Any) -> dict[str, Any]:
    names = ("width", "cells", "bytes_up", "bytes_down", "mechanism", "how", "paper_epsilon", "time_s")
    clients = body["senders"]
    moments = {name: body[name] for name in ("shortened", "unreported", "clipped") if name in body}
    return {"centroids": body["rows"], "clients": clients, **{name: body[name] for name in names}, **moments}
