"""`fedup unlearn --dry-run`: what answering requests would take, found out without changing anything."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedup.cli._progress import wide_console
from fedup.cli._session import Session
from fedup.cli._text import print_orphaned_classes
from fedup.filters.bottleneck import FilterConfig
from fedup.run.answer import NewRequest
from fedup.run.in_words import count, ids
from fedup.run.state import State
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Centroids
from fedup.unlearning.unlearn import classes_left_without_holder, plan, rehearse

_REHEARSED_STEPS = 20


def describe_plan(
    session: Session,
    served: tuple[State, PluggedModel],
    new: Sequence[NewRequest],
    config: FilterConfig,
    *,
    keep_sealed: bool,
    force: bool,
) -> dict[str, Any]:
    """Who would be asked, what would be replaced, what it costs in time and privacy; as plain data."""
    (state, plugged), clients = served, session.federation_if_here
    store, requests = session.store(state), state.forgets | {request.forget for request in new}
    planned = plan(plugged, store, requests, clients=clients, config=config, force=force)
    sent = len(planned.cells_asked)
    per_client_s = state.collected.body["time_s"] / max(1, len(state.collected.body["releases"]))  # type: ignore[union-attr]
    expected_s = _time_of_fit(plugged, store, requests, config) + per_client_s * len(planned.clients_contacted)
    return {
        "requests": [{"reference": one.reference, "what": str(one.forget), "rows": one.rows} for one in new],
        "in_force_afterwards": len(requests),
        "classes_left_without_holder": classes_left_without_holder(store, requests),
        "would_be_measured": clients is not None,
        "cells_sealed": planned.cells_sealed,
        "cells_asked": [list(cell) for cell in planned.cells_asked],
        "samples_unknown": planned.samples_unknown,
        "clients_contacted": planned.clients_contacted,
        "centroids_kept": planned.centroids_kept,
        "clients_of_eraser": planned.clients_of_eraser,
        "notes": planned.notes,
        "privacy_cost": _privacy_cost(sent, store, eraser=bool(planned.clients_of_eraser)),
        "replaced_cells": "none" if not sent else "sealed where it is the original" if keep_sealed else "destroyed",
        "expected_time_s": round(expected_s, 3),
    }


def _privacy_cost(cells: int, store: Centroids, *, eraser: bool) -> str:
    mechanism = store.how.mechanism
    if store.dp is not None and (cells or eraser):
        releases = [f"{cells} cells sent again"] if cells else []
        releases += ["statistics for an eraser"] if eraser else []
        return f"{' and '.join(releases)}, each a release with {mechanism}, charged to its client"
    sent = [f"{cells} cells sent again, protection: {mechanism}"] if cells else []
    if eraser:
        sent.append("sums and second moments of forgotten and retained rows for an eraser, without noise")
    return "; ".join(sent) or "none: nothing is sent"


def _time_of_fit(plugged: PluggedModel, store: Centroids, requests: Any, config: FilterConfig) -> float:
    """A few steps of the very fit, measured and multiplied."""
    steps = config.steps_for(len(store.vectors))
    few = min(steps, _REHEARSED_STEPS)
    rehearse(plugged, store, requests, replace(config, steps=1, epochs=None))  # loads what is loaded on first use
    started = time.perf_counter()
    rehearse(plugged, store, requests, replace(config, steps=few, epochs=None))
    return (time.perf_counter() - started) / few * steps


def print_plan(result: dict[str, Any]) -> None:
    """The same for people."""
    console = wide_console()
    for request in result["requests"]:
        rows, where = request["rows"], ""
        if "count" in rows:
            where = f": {count(rows['count'], 'training row')} of {count(len(rows['clients']), 'client')}"
        console.print(f"Would {request['what']}{where}.", markup=False)
    fitted = "A bottleneck, where one is needed," if result["clients_of_eraser"] else "The filter"
    unknown, kept = result["samples_unknown"], result["replaced_cells"]
    again = f"those of {unknown:,} samples, whose clients know the classes" if unknown else len(result["cells_asked"])
    before = "" if kept == "none" else f" (what they held before: {kept})"
    for note in result["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
    console.print(
        f"{fitted} would be fitted to about {result['centroids_kept']:,} centroids; {result['cells_sealed']} cells "
        f"left out and sealed.\nClients contacted: {ids(result['clients_contacted']) or 'none'}; cells clustered "
        f"again: {again}{before}.\nPrivacy cost: {result['privacy_cost']}.\n"
        f"Expected time: {result['expected_time_s']:.1f} s, besides loading and measuring."
    )
    print_orphaned_classes(console, result)
    if not result["would_be_measured"]:
        console.print("The filter could not be measured without the data: it would be put in force with --force only.")
    console.print("Nothing was changed.")
