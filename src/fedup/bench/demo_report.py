"""The demo's report: JSON for programs, one HTML page for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedup.bench.figures import bars_of_time, bars_per_class, features_before_and_after, images_under_attack
from fedup.bench.format import show_bytes
from fedup.files import write_text
from fedup.page import percent, render

STATES = ("original", "forgotten", "retrained", "restored")


def write_demo_report(result: dict[str, Any], drawings: Mapping[str, dict[str, Any]], folder: Path) -> Path:
    """Write report.json, report.html and the figures into the folder; the page's path."""
    write_text(folder / "report.json", json.dumps(result, indent=2) + "\n")
    figures = _figures(result, drawings)
    for name, svg in figures.items():
        write_text(folder / "figures" / f"{name}.svg", svg)
    content = {
        "figures": figures,
        "answers": {request["kind"]: _how_it_was_answered(request) for request in result["requests"]},
        "overview": [_overview(request) for request in result["requests"]],
        "show_bytes": show_bytes,
    }
    write_text(folder / "report.html", render("demo", {**result, **content}))
    return folder / "report.html"


def summary_row(request: dict[str, Any]) -> list[str]:
    """Kind, R-A / F-A in each state, seconds to forget and to retrain, and whether the model came back."""
    shares = [f"{request[state]['retain']:.3f} / {request[state]['forget']:.3f}" for state in STATES]
    return [request["kind"], *shares, *_costs(request)]


def _overview(request: dict[str, Any]) -> list[str]:
    """The same in per cent, before and after beside each other."""
    before, after, retrained = (request[state] for state in ("original", "forgotten", "retrained"))
    shares = [
        (f"{percent(before[side])} → {percent(after[side])}", percent(retrained[side])) for side in ("retain", "forget")
    ]
    return [request["kind"], *shares[0], *shares[1], *_costs(request)]


def _costs(request: dict[str, Any]) -> list[str]:
    same = "bit-identical" if request["restored_bit_identical"] else "DIFFERS"
    return [f"{request['time_s']['total']:.2f} s", f"{request['retrain_time_s']:.1f} s", same]


def _figures(result: dict[str, Any], drawings: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """SVG by name: accuracies and features of each request, and the times of all."""
    names, times, figures = result["class_names"], {}, {}
    for request in result["requests"]:
        kind, drawn = request["kind"], drawings[request["kind"]]
        times[f"{kind} request"] = request["time_s"]["total"], request["retrain_time_s"]
        figures[f"{kind}-accuracy"] = bars_per_class({s: request["accuracy_per_class"][s] for s in STATES}, names)
        if any(drawn["features"]["forgotten"]):
            figures[f"{kind}-features"] = features_before_and_after(drawn["features"], names, f"{kind} to forget")
        if "attack" in request:
            figures[f"{kind}-attack"] = images_under_attack(request["attack"] | {"images": drawn["images"]}, names)
    return {"time": bars_of_time(times), **figures}


def _how_it_was_answered(request: dict[str, Any]) -> str:
    contacted, counting, bytes_up = request["clients_contacted"], request["clients_counting"], request["bytes"]["up"]
    eraser = (request["erasure"] or {}).get("place")
    parts = [
        f"An eraser at {eraser['cut']}, {eraser['positions']} of {eraser['of']} positions, and the closed form"
        if eraser
        else "The closed form from sums of what is retained",
        f"{show_bytes(request['filter_bytes'])}; "
        + (f"clients {', '.join(map(str, contacted))} asked again" if contacted else "no client asked"),
        f"{len(counting)} counted answers to measure it" if counting else "",
        f"{show_bytes(bytes_up)} sent" if bytes_up else "",
    ]
    stages = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in request["time_s"].items() if stage != "total")
    return f"{', '.join(filter(None, parts))}. Stages: {stages}."
