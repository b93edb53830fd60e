"""A summary of a run folder that loads no array, for `fedup status` and for programs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedup.run.bases import weights_in_words
from fedup.run.bindings import describe_bindings
from fedup.run.evidence_exact import last_claim
from fedup.run.folder import Run
from fedup.run.journal import Event
from fedup.run.ledger import describe_ledger, ledger_of
from fedup.run.queue import describe_queue
from fedup.run.state import Request, State
from fedup.run.training_files import checkpoints, training_holder


def overview(run: Run, state: State) -> dict[str, Any]:
    """Requests, the filter in force, what is sealed, storage and the last event."""
    leftovers = run.files.leftovers(state.files, training=state.trained is None)
    return {
        "run": str(run.path),
        "about": dict(state.about),
        "trained": _event(state.trained, "fingerprint", "accuracy", "time_s", "rows"),
        "trained_on": state.trained.body.get("machine") if state.trained else None,
        "rounds_done": None if state.trained else int(peek(run.files.checkpoint).get("rounds", 0)),
        "collected": _event(state.collected, "rows", "cells", "how", "time_s"),
        "protection": state.protection,
        "guarantee": asdict(state.guarantee) if state.guarantee else None,
        "filter": None if state.filter is None else {"id": state.filter.id, **state.filter.to_json()},
        "claim": last_claim(state)["kind"] if state.is_exact and state.active else None,
        "base": {"generation": state.generation, "fingerprint": state.base, "rounds": state.rounds},
        "training": _training(run, state),
        "in_force": [request.id for request in state.active],
        "open": [request.id for request in state.open],
        "waiting": [request.id for request in state.waiting],
        "pending": [dict(part) for part in state.pending],
        **describe_queue(run, state),
        "finished": [request.id for request in state.finished],
        "requests": [_request(state, request) for request in state.requests],
        "declined": [_event(event, "step", "why") for event in state.events if event.kind == "declined"],
        "nodes": describe_bindings(state),
        "ledger": describe_ledger(state),
        "budget": asdict(budget) if (budget := ledger_of(state).budgets.get(None)) else None,
        "sealed": _sealed(run, state),
        "storage_bytes": _storage(run),
        "leftovers": [path.name for path in leftovers],
        "events": len(state.events),
        "head": state.head,
        "written_by": run.holder,
    }


def request_releases(state: State) -> dict[int, dict[str, int]]:
    """By client: how many messages it sent, and their bytes."""
    sent: dict[int, dict[str, int]] = {}
    for release in (release for event in state.events for release in event.body.get("releases", ())):
        own = sent.setdefault(release["client"], {"messages": 0, "bytes": 0})
        own["messages"] += 1
        own["bytes"] += release["bytes"]
    return sent


def _training(run: Run, state: State) -> dict[str, Any] | None:
    """A training beside the served base that is not over: which, how many rounds are done, and who trains now."""
    for path, command in checkpoints(run.path, state).items():
        if path.exists():
            done, who = int(peek(path).get("rounds", 0)), training_holder(run.path)
            return {"command": command, "rounds_done": done, "written_by": who}
    return None


def _request(state: State, request: Request) -> dict[str, Any]:
    body, entry = request.asked_in.body, request.entry
    return {
        **request.to_json(),
        "weights": weights_in_words(state, request),
        "base": state.generation_at(request.answered_in.seq),
        "verdict": entry["verdict"]["finding"] if entry["verdict"] else None,
        "rows": entry["rows"].get("count"),
        "time_s": sum(body["time_s"].values()),
        "clients_contacted": body["clients_contacted"],
    }


def _event(event: Event | None, *names: str) -> dict[str, Any] | None:
    return None if event is None else {"at": event.at, **{name: event.body[name] for name in names}}


def _sealed(run: Run, state: State) -> dict[str, int]:
    """Cells that requests in force leave out or that wait for their client, cells purged, originals kept beside their
    replacement, and statistics of erased rows."""
    path = run.files.folder / state.centroids.name if state.centroids else None
    header = peek(path) if path else {}
    clients = {client for request in state.active for client in request.forget.client_ids}
    classes = {label for request in state.active for label in request.forget.class_ids}
    purged = {tuple(name) for name in header.get("purged", ())}
    cells = _cells(path, header) if path else []
    named = {(client, label) for client, label in cells if client in clients or label in classes}
    named |= {(int(client), label) for client, labels in header.get("pending", {}).items() for label in labels}
    kept = {"originals": len(header.get("sealed", ())), "erased": len(header.get("erased", ()))}
    return {"cells": len(named - purged), **kept, "purged": len(purged)}


def _cells(path: Path, header: dict[str, Any]) -> list[tuple[int, int]]:
    """Client and class of each cell of a store: in its header, or for moments in two columns."""
    if header.get("cells"):
        return [(client, label) for client, label, *_ in header["cells"]]
    try:
        with safe_open(path, framework="numpy") as file:
            columns = [file.get_tensor(f"cells.{name}").tolist() for name in ("clients", "labels")]
    except (OSError, SafetensorError):
        return []
    return list(zip(*columns, strict=True))


def _storage(run: Run) -> dict[str, int]:
    """Bytes by kind of file."""
    sizes: dict[str, int] = {}
    for path in run.path.rglob("*"):
        if path.is_file():
            kind = path.name.split("-")[0] if path.parent == run.files.folder else path.relative_to(run.path).parts[0]
            sizes[kind] = sizes.get(kind, 0) + path.stat().st_size
    return sizes


def peek(path: Path) -> dict[str, Any]:
    """fedup's header of a safetensors file, unchecked; empty where it cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["fedup"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return {}
    return header if isinstance(header, dict) else {}
