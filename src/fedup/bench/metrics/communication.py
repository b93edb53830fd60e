"""Bytes as serialised, by direction, and whom they concern."""

from fedup.bench.case import Case
from fedup.bench.metrics import Column

COLUMNS = (
    Column("bytes_up", "up", "Bytes from clients to the server after the request.", "cost", "lower", "bytes", order=4),
    Column(
        "bytes_down", "down", "Bytes from the server to clients after the request.", "cost", "lower", "bytes", order=5
    ),
    Column("ahead_bytes_up", "up ahead", "Bytes sent once, before any request.", "cost", "lower", "bytes", order=6),
    Column(
        "bytes_all", "all bytes", "Up, down and ahead together: the paper's Comm.", "cost", "lower", "bytes", order=7
    ),
)


def measure(case: Case) -> dict[str, int]:
    """After the request, ahead of it, and all together."""
    cost = case.unlearned.cost
    return {
        "bytes_up": cost.bytes_up,
        "bytes_down": cost.bytes_down,
        "ahead_bytes_up": cost.ahead_bytes_up,
        "bytes_all": cost.bytes_up + cost.bytes_down + cost.ahead_bytes_up,
    }
