"""The demo's report: JSON for programs, one HTML page for people."""

import json
from pathlib import Path
from typing import Any

from fedup.bench.figures import bars_of_time, bars_per_class, features_before_and_after, images_under_attack
from fedup.files import write_text
from fedup.page import Page

_STATES = ("original", "forgotten", "retrained", "restored")


def write_demo_report(result: dict[str, Any], folder: Path) -> Path:
    """Write report.json, report.html and the figures into the folder; the page's path."""
    plain = [without_drawings(request) for request in result["requests"]]
    figures = _figures(result)
    write_text(folder / "report.json", json.dumps({**result, "requests": plain}, indent=2) + "\n")
    for name, svg in figures.items():
        write_text(folder / "figures" / f"{name}.svg", svg)
    _page(result, figures).write(folder / "report.html")
    return folder / "report.html"


def without_drawings(request: dict[str, Any]) -> dict[str, Any]:
    """A request's figures without points and pixels."""
    plain = {key: value for key, value in request.items() if key != "features"}
    if "attack" in plain:
        plain["attack"] = {key: value for key, value in plain["attack"].items() if key != "images"}
    return plain


def _figures(result: dict[str, Any]) -> dict[str, str]:
    """SVG by name: accuracies and features of each request, and the times of all."""
    names = result["class_names"]
    figures = {
        "time": bars_of_time(
            {f"{r['kind']} request": (r["time_s"]["total"], r["retrain_time_s"]) for r in result["requests"]}
        )
    }
    for request in result["requests"]:
        per_class = {state: request["accuracy_per_class"][state] for state in _STATES}
        figures[f"{request['kind']}-accuracy"] = bars_per_class(per_class, names)
        if any(request["features"]["forgotten"]):
            what = f"{request['kind']} to forget"
            figures[f"{request['kind']}-features"] = features_before_and_after(request["features"], names, what)
        if "attack" in request:
            figures[f"{request['kind']}-attack"] = images_under_attack(request["attack"], names)
    return figures


def _page(result: dict[str, Any], figures: dict[str, str]) -> Page:
    collected = result["collect"]
    page = Page(
        "A federated model forgets, and remembers",
        f"{result['clients']} clients trained LeNet-5 on {result['train_rows']:,} images of {result['data']} in "
        f"{result['rounds']} rounds of FedAvg. Then three requests came in. Each was answered by a small filter "
        "inside the model, whose weights were never touched.",
    )
    page.heading("What happened")
    page.table(["R-A / F-A", *_STATES, "forget in", "retrain in", "restored"], [_row(r) for r in result["requests"]])
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
        f"{collected['clients_contacted']} clients, {_size(collected['bytes_up'])} as serialised, in "
        f"{collected['time_s']:.2f} s."
    )
    machine = result["machine"]
    page.footer(
        f"fedup {machine['fedup']}, torch {machine['torch']}, {machine['processor']}, {machine['threads']} threads, "
        f"seed {result['seed']}, one run. Made by `fedup demo --data {result['data']} --seed {result['seed']}`."
    )
    return page


def _request_section(page: Page, request: dict[str, Any], figures: dict[str, str]) -> None:
    contacted, stages = request["clients_contacted"], request["time_s"].items()
    asked = ", ".join(map(str, contacted))
    who = "client" if len(contacted) == 1 else "clients"
    sent = f"{who} {asked} asked again" if contacted else "no client asked"
    if request["clients_counting"]:
        sent += f", {len(request['clients_counting'])} counted answers to measure it"
    sent += f", {_size(request['bytes']['up'])} sent" if request["bytes"]["up"] else ""
    page.heading(f"The {request['kind']} request")
    page.paragraph(request["story"])
    erasure = request["erasure"]
    made_of = (
        f"An eraser at {erasure['place']['cut']}, {erasure['place']['positions']} of {erasure['place']['of']} positions"
        if erasure
        else f"A bottleneck fitted to {request['centroids_used']:,} centroids"
    )
    page.paragraph(
        f"{made_of}, {_size(request['filter_bytes'])}; {sent}. Stages: "
        + ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in stages if stage != "total")
        + "."
    )
    if "attack" in request:
        success, right = request["attack"]["success"], request["attack"]["accuracy"]
        page.table(
            ["test images with the trigger", *success],
            [
                ["led astray", *(f"{value:.3f}" for value in success.values())],
                ["classified right", *(f"{value:.3f}" for value in right.values())],
            ],
        )
        page.figure(figures[f"{request['kind']}-attack"], "Test images with the trigger: the answer before and after.")
    page.figure(figures[f"{request['kind']}-accuracy"], "Accuracy per class on the official test set.")
    if f"{request['kind']}-features" in figures:
        caption = "Held-out features in front of the last layer, on the two main axes of the original ones."
        page.figure(figures[f"{request['kind']}-features"], caption)


def _row(request: dict[str, Any]) -> list[str]:
    return [
        request["kind"],
        *(f"{request[state]['retain']:.3f} / {request[state]['forget']:.3f}" for state in _STATES),
        f"{request['time_s']['total']:.2f} s",
        f"{request['retrain_time_s']:.1f} s",
        "bit-identical" if request["restored_bit_identical"] else "DIFFERS",
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.1f} kB"
