"""What the example app took on Flower, for people; from the result files that it writes."""

from typing import Any

from fedup.bench.format import show_bytes
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

HEAD = ["step", "s", "messages", "up", "down", "R-A", "F-A", "by stage, s"]
_LEAST_S = 0.001  # of a stage that is worth a word


def flower_table(result: dict[str, Any]) -> str:
    """One run: training, collection, and each request from its first question to the filter in force."""
    rows = [["FedAvg, Flower's own", _seconds(result["training"]["time_s"]), "", "", "", "", "", ""]]
    rows.append(["collect", *_costs(result["collection"], result["collection"]["time_s"]), "", "", ""])
    for request in result["requests"]:
        stages = ", ".join(
            f"{name} {_seconds(value)}" for name, value in request["time_s"].items() if value >= _LEAST_S
        )
        judged = [f"{request['before'][key]:.2f} → {request['after'][key]:.2f}" for key in ("retain", "forget")]
        rows.append([f"forget a {request['kind']}", *_costs(request, sum(request["time_s"].values())), *judged, stages])
    return "\n\n".join(
        [
            f"## {result['way'].capitalize()}, {result['nodes']} nodes",
            f"`python examples/flower-app/run.py {result['way']}` on {result['machine']['processor']}, all nodes on "
            f"one machine, commit {show_commit(result['code'])}; n = 1. R-A on the test set, F-A on what was to be "
            "forgotten; each model was restored bit for bit.",
            markdown_table(HEAD, rows),
        ]
    )


def _costs(of: dict[str, Any], seconds: float) -> list[str]:
    return [_seconds(seconds), str(of["messages"]), show_bytes(of["bytes_up"]), show_bytes(of["bytes_down"])]


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
