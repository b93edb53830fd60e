"""The demo's report: JSON for programs, one HTML page for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedup.bench.figures import bars_of_time, bars_per_class, features_before_and_after, images_under_attack
from fedup.bench.format import show_bytes
from fedup.files import write_text
from fedup.page import Page

STATES = ("original", "forgotten", "retrained", "restored")


def write_demo_report(result: dict[str, Any], drawings: Mapping[str, dict[str, Any]], folder: Path) -> Path:
    """Write report.json, report.html and the figures into the folder; the page's path."""
    write_text(folder / "report.json", json.dumps(result, indent=2) + "\n")
    figures = _figures(result, drawings)
    for name, svg in figures.items():
        write_text(folder / "figures" / f"{name}.svg", svg)
    _page(result, figures).write(folder / "report.html")
    return folder / "report.html"


def summary_row(request: dict[str, Any]) -> list[str]:
    """Kind, R-A / F-A in each state, seconds to forget and to retrain, and whether the model came back."""
    return [
        request["kind"],
        *(f"{request[state]['retain']:.3f} / {request[state]['forget']:.3f}" for state in STATES),
        f"{request['time_s']['total']:.2f} s",
        f"{request['retrain_time_s']:.1f} s",
        "bit-identical" if request["restored_bit_identical"] else "DIFFERS",
    ]


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


def _page(result: dict[str, Any], figures: dict[str, str]) -> Page:
    collected, machine = result["collect"], result["machine"]
    page = Page(
        "A federated model forgets, and remembers",
        f"{result['clients']} clients trained LeNet-5 on {result['train_rows']:,} images of {result['data']} in "
        f"{result['rounds']} rounds of FedAvg. Then three requests came in. Each was answered by a small filter "
        "inside the model, whose weights were never touched.",
    )
    page.heading("What happened")
    page.table(
        ["R-A / F-A", *STATES, "forget in", "retrain in", "restored"], [summary_row(r) for r in result["requests"]]
    )
    page.paragraph(
        "R-A is the accuracy on held-out data that stays; F-A is the accuracy on held-out data of what is forgotten, "
        "for samples on the samples themselves. Retraining without the data is the reference: a request is answered "
        "well when “forgotten” is close to “retrained” on both sides."
    )
    page.note(
        "What is not claimed: the frozen weights still hold what they learned. The filter suppresses it at the served "
        "interface; whoever has the weights and takes the filter out has the original model."
    )
    for request in result["requests"]:
        _request_section(page, request, figures)
    page.heading("Time")
    page.figure(figures["time"], "From request to effect, against retraining with the same rounds on the same machine.")
    page.paragraph(
        f"Centroids were collected once, after training: {collected['centroids']:,} of them from "
        f"{collected['clients_contacted']} clients, {show_bytes(collected['bytes_up'])} as serialised, in "
        f"{collected['time_s']:.2f} s."
    )
    page.footer(
        f"fedup {machine['fedup']}, torch {machine['torch']}, {machine['processor']}, {machine['threads']} threads, "
        f"seed {result['seed']}, one run. Made by `fedup demo --data {result['data']} --seed {result['seed']}`."
    )
    return page


def _request_section(page: Page, request: dict[str, Any], figures: dict[str, str]) -> None:
    kind = request["kind"]
    page.heading(f"The {kind} request")
    page.paragraph(request["story"])
    page.paragraph(_how_it_was_answered(request))
    if "attack" in request:
        success, right = (
            [f"{value:.3f}" for value in request["attack"][key].values()] for key in ("success", "accuracy")
        )
        page.table(
            ["test images with the trigger", *request["attack"]["success"]],
            [["led astray", *success], ["classified right", *right]],
        )
    captions = {
        "attack": "Test images with the trigger: the answer before and after.",
        "accuracy": "Accuracy per class on the official test set.",
        "features": "Held-out features in front of the last layer, on the two main axes of the original ones.",
    }
    for name, caption in captions.items():
        if f"{kind}-{name}" in figures:
            page.figure(figures[f"{kind}-{name}"], caption)


def _how_it_was_answered(request: dict[str, Any]) -> str:
    contacted, counting, bytes_up = request["clients_contacted"], request["clients_counting"], request["bytes"]["up"]
    eraser = (request["erasure"] or {}).get("place")
    parts = [
        f"An eraser at {eraser['cut']}, {eraser['positions']} of {eraser['of']} positions"
        if eraser
        else f"A bottleneck fitted to {request['centroids_used']:,} centroids",
        f"{show_bytes(request['filter_bytes'])}; "
        + (f"clients {', '.join(map(str, contacted))} asked again" if contacted else "no client asked"),
    ]
    if counting:
        parts.append(f"{len(counting)} counted answers to measure it")
    if bytes_up:
        parts.append(f"{show_bytes(bytes_up)} sent")
    stages = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in request["time_s"].items() if stage != "total")
    return f"{', '.join(parts)}. Stages: {stages}."
