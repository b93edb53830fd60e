"""Scale for people: what was measured, and what its largest size says of far larger ones."""

from typing import Any

from fedup.bench.format import show_bytes
from fedup.tasks.machine import show_commit

FAR = (10**5, 10**7)  # clients
HEAD = [
    "clients",
    "collect, s",
    "messages",
    "up",
    "down",
    "store on disk",
    "memory, first",
    "memory",
    "memory, no folder",
    "class, s",
    "client, s",
    "sample, s",
    "sample, messages",
    "sample, up",
    "under DP, s",
    "under DP, up",
    "under DP, memory",
]


def measured_rows(result: dict[str, Any]) -> list[list[str]]:
    """One line for each size."""
    return [_row(one["clients"], one) for one in result["sizes"]]


def far_rows(result: dict[str, Any]) -> list[list[str]]:
    """What the formulas say, with the figures of the largest size that was measured."""
    largest = max(result["sizes"], key=lambda one: one["clients"])
    return [_row(clients, _grown(largest, clients / largest["clients"])) for clients in FAR]


def _row(clients: int, of: dict[str, Any]) -> list[str]:
    collect, sample, private = of["collect"], of["sample"], of["collect_private"]
    return [
        f"{clients:,}",
        _seconds(collect["time_s"]),
        f"{collect['messages']:,}",
        show_bytes(collect["bytes_up"]),
        show_bytes(collect["bytes_down"]),
        show_bytes(of["store_bytes"]),
        _memory(collect["peak_bytes"]),
        _memory(of["collect_again"]["peak_bytes"]),
        _memory(of["collect_in_memory"]["peak_bytes"]),
        *(_seconds(of[kind]["time_s"]) for kind in ("class", "client", "sample")),
        str(sample["messages"]),
        show_bytes(sample["bytes_up"]),
        _seconds(private["time_s"]),
        show_bytes(private["bytes_up"]),
        _memory(private["peak_bytes"]),
    ]


def _grown(of: dict[str, Any], times: float) -> dict[str, Any]:
    """Collections grow with the clients in all they take; answers to requests do not."""
    more = {name: value for name, value in of.items() if name in ("class", "client", "sample")}
    for name in ("collect", "collect_again", "collect_in_memory", "collect_private"):
        more[name] = {key: None if value is None else round(times * value) for key, value in of[name].items()}
    return {**more, "store_bytes": times * of["store_bytes"]}


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


def _memory(value: float | None) -> str:
    return "–" if value is None else show_bytes(value)


def scale_table(result: dict[str, Any]) -> str:
    """Both tables, and what they are of."""
    from fedup.bench.tables import markdown_table

    about, machine = result["about"], result["machine"]
    commit = show_commit(result["code"])
    largest = max(one["clients"] for one in result["sizes"])
    return "\n\n".join(
        [
            f"## {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}",
            f"`fedup bench scale`, commit {commit}; n = 1. Clients of {about['rows']} rows, {about['width']} features, "
            f"ρ = 0.8, a model of {show_bytes(result['sizes'][0]['model_bytes'])}; {about['engine']}: all nodes are "
            "simulated on these cores, and that is what most of the time goes to. *Memory* is by how much this "
            "process, without pages of files, grows at most in a collection: in the first one with the states of the "
            "simulated nodes, weights and features, which are in it too; then in a second, where only the server's "
            "part is new; and in a third without a folder. A sample request names "
            f"{about['forgotten']} rows of one client.",
            markdown_table(HEAD, measured_rows(result)),
            f"### From {largest:,} clients to far more\n\nNot measured: collections taken to grow in proportion to the "
            "clients, answers to requests not at all, which leaves out their one pass over the store.",
            markdown_table(HEAD, far_rows(result)),
        ]
    )
