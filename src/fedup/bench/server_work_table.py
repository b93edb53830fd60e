"""The server's work for people: what each client of a collection costs it, beside the goals."""

from typing import Any

from fedup.bench.format import show_bytes
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

HEAD = ["replies", "statistics", "CPU, ms a client", "wall, ms a client", "memory", "goals", "opened again, ms", "load"]


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """One line for each run."""
    return [_row(run, result["goals"]) for run in result["runs"]]


def _row(run: dict[str, Any], goals: dict[str, Any]) -> list[str]:
    peak = run["peak_bytes"]
    missed = [] if run["cpu_ms"] <= goals["ms"] else ["CPU"]
    missed += [] if run["wall_ms"] <= goals["ms"] else ["wall"]
    missed += [] if peak is None or peak <= goals["peak_bytes"] else ["memory"]
    return [
        f"{run['clients']:,}",
        "under DP" if run["kind"] == "private" else run["kind"],
        f"{run['cpu_ms']:.2f}",
        f"{run['wall_ms']:.2f}",
        "–" if peak is None else show_bytes(peak),
        f"missed: {', '.join(missed)}" if missed else "met",
        f"{run['open_ms'] * run['clients']:,.0f}",
        f"{run['load']:.1f}",
    ]


def server_work_table(result: dict[str, Any]) -> str:
    """The table, and what it is of."""
    about, machine, goals = result["about"], result["machine"], result["goals"]
    return "\n\n".join(
        [
            f"## {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, "
            f"torch {machine['torch']}",
            f"`fedup bench scale`, commit {show_commit(result['code'])}; n = 1. A collection into a run folder from "
            f"clients of about {about['rows']} rows, {about['width']} features, {about['classes']} classes. Replies "
            f"are made up before ({about['templates']} different ones, each client under its own number), and what it "
            "takes to hand them over is not counted. All else is the server's real work: reading and checking each "
            "answer, comparing all nodes, the answers on disk, the ledger, the store, the journal. *CPU* is this "
            "process's own time; *wall* has also what it waits for: the disk, and on a busy machine the others. "
            "*Load* is how many processes wanted to run in the minute before: above the number of cores, *wall* says "
            "little. *Memory* is by how much the process grows at most, without pages of files; what the made-up nodes "
            "keep is in it: 26 bytes for each message, and the different replies. "
            f"Goals: {goals['ms']:g} ms a client, {show_bytes(goals['peak_bytes'])}.",
            markdown_table(HEAD, rows_of(result)),
        ]
    )
