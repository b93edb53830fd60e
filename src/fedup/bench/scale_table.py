"""Flower for people: what scale was measured, what its largest size says of far larger ones, and the example app."""

from collections.abc import Callable
from typing import Any

from fedup.bench.format import show_bytes
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

FAR = (10**5, 10**7)  # clients


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _memory(value: float | None) -> str:
    return "–" if value is None else show_bytes(value)


_COLUMNS: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (  # title, what was measured, figure, its format
    ("collect, s", "collect", "time_s", _seconds),
    ("messages", "collect", "messages", "{:,}".format),
    ("up", "collect", "bytes_up", show_bytes),
    ("down", "collect", "bytes_down", show_bytes),
    ("store on disk", "store", "bytes", show_bytes),
    ("memory, first", "collect", "peak_bytes", _memory),
    ("memory", "collect_again", "peak_bytes", _memory),
    ("memory, no folder", "collect_in_memory", "peak_bytes", _memory),
    *((f"{kind}, s", kind, "time_s", _seconds) for kind in ("class", "client", "sample")),
    ("sample, messages", "sample", "messages", str),
    ("sample, up", "sample", "bytes_up", show_bytes),
    ("under DP, s", "collect_private", "time_s", _seconds),
    ("under DP, up", "collect_private", "bytes_up", show_bytes),
    ("under DP, memory", "collect_private", "peak_bytes", _memory),
)
HEAD = ["clients", *(title for title, *_ in _COLUMNS)]


def measured_rows(result: dict[str, Any]) -> list[list[str]]:
    """One line for each size."""
    return [_row(size["clients"], size, 1) for size in result["sizes"]]


def far_rows(result: dict[str, Any]) -> list[list[str]]:
    """What the formulas say, with the figures of the largest size that was measured: what asks all clients grows
    with them in all it takes; all else does not."""
    largest = max(result["sizes"], key=lambda size: size["clients"])
    return [_row(clients, largest, clients / largest["clients"]) for clients in FAR]


def _row(clients: int, size: dict[str, Any], times: float) -> list[str]:
    figures = {**size, "store": {"bytes": size["store_bytes"]}}
    shown = [f"{clients:,}"]
    for _, part, key, show in _COLUMNS:
        value = figures[part][key]
        asks_all = part == "store" or figures[part]["messages"] >= size["clients"]
        grows = times != 1 and value is not None and asks_all
        shown.append(show(round(times * value) if grows else value))
    return shown


def scale_table(result: dict[str, Any]) -> str:
    """Both tables, and what they are of."""
    about, machine = result["about"], result["machine"]
    largest = max(size["clients"] for size in result["sizes"])
    return "\n\n".join(
        [
            f"## {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
            f"`fedup bench scale --clients …`, commit {show_commit(result['code'])}; n = 1. Clients of "
            f"{about['rows']} rows, {about['width']} features, ρ = 0.8, a model of "
            f"{show_bytes(result['sizes'][0]['model_bytes'])}; "
            f"{about['engine']}: all nodes are simulated on these cores, and that is what most of the time goes to. "
            "*Memory* is by how much this process, without pages of files, grows at most in a collection: in the first "
            "one with the states of the simulated nodes, weights and features, which are in it too; then in a second, "
            "where only the server's part is new; and in a third without a folder. A sample request names "
            f"{about['forgotten']} rows of one client; others are answered without counting (`Terms(measure=False)`).",
            markdown_table(HEAD, measured_rows(result)),
            f"### From {largest:,} clients to far more\n\nNot measured: what asks all clients is taken to grow in "
            "proportion to them, all else not at all, which leaves out its one pass over the store.",
            markdown_table(HEAD, far_rows(result)),
        ]
    )


FLOWER_HEAD = ["step", "s", "messages", "up", "down", "R-A", "F-A", "by stage, s"]
_LEAST_S = 0.001  # of a stage that is worth a word


def flower_table(result: dict[str, Any]) -> str:
    """One run: training, collection, and each request from its first question to the filter in force."""
    rows = [["FedAvg, Flower's own", _seconds(result["training"]["time_s"]), "", "", "", "", "", ""]]
    rows.append(["collect", *_costs(result["collection"], result["collection"]["time_s"]), "", "", ""])
    for request in result["requests"]:
        stages = ", ".join(f"{stage} {_seconds(s)}" for stage, s in request["time_s"].items() if s >= _LEAST_S)
        judged = [f"{request['before'][key]:.2f} → {request['after'][key]:.2f}" for key in ("retain", "forget")]
        rows.append([f"forget a {request['kind']}", *_costs(request, sum(request["time_s"].values())), *judged, stages])
    return "\n\n".join(
        [
            f"## {result['way'].capitalize()}, {result['nodes']} nodes",
            f"`python examples/flower-app/run.py {result['way']}` on {result['machine']['processor']}, all nodes on "
            f"one machine, commit {show_commit(result['code'])}; n = 1. R-A on the test set, F-A on what was to be "
            "forgotten; each model was restored bit for bit.",
            markdown_table(FLOWER_HEAD, rows),
        ]
    )


def _costs(of: dict[str, Any], seconds: float) -> list[str]:
    return [_seconds(seconds), str(of["messages"]), show_bytes(of["bytes_up"]), show_bytes(of["bytes_down"])]
