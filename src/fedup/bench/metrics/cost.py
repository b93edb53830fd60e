"""What an answer takes: time from request to effect, bytes as serialised, clients and their work, storage."""

from typing import Any

from fedup.bench.case import Case
from fedup.bench.metrics import Column

_EFFECT = "Seconds until R-A is at most 1 point below Retrain's and F-A (backdoors: ASR) at most 1 point above."
_AHEAD = "Seconds of work before any request, once a federation."
_DOWN = "Bytes from the server to clients after the request."
_ALL = "Up, down and ahead together: the paper's Comm."
_STORAGE = "Bytes that the server keeps for the sake of requests."
COLUMNS = (
    Column("time", "time", "Seconds from request to the final model.", "cost", "lower", "seconds", order=3, timed=True),
    Column("time_to_effect", "time to effect", _EFFECT, "cost", "lower", "seconds", order=6, timed=True),
    Column("ahead_time", "time ahead", _AHEAD, "cost", "lower", "seconds", order=9, timed=True),
    Column("bytes_up", "up", "Bytes from clients to the server after the request.", "cost", "lower", "bytes", order=10),
    Column("bytes_down", "down", _DOWN, "cost", "lower", "bytes", order=13),
    Column("ahead_bytes_up", "up ahead", "Bytes sent once, before any request.", "cost", "lower", "bytes", order=16),
    Column("bytes_all", "all bytes", _ALL, "cost", "lower", "bytes", order=19),
    Column("clients_contacted", "clients", "Clients contacted after the request.", "cost", "lower", "count", order=28),
    Column("local_steps", "local steps", "Steps of gradient descent at clients.", "cost", "lower", "count", order=29),
    Column("storage_bytes", "storage", _STORAGE, "cost", "lower", "bytes", order=30),
)


def measure(case: Case) -> dict[str, Any]:
    """After the request and ahead of it; seconds also by stage and until the effect."""
    cost = case.unlearned.cost
    return {
        "time": cost.total_time_s,
        "time_by_stage": cost.time_s,
        "time_to_effect": case.effect_s(),
        "ahead_time": cost.ahead_time_s,
        "bytes_up": cost.bytes_up,
        "bytes_down": cost.bytes_down,
        "ahead_bytes_up": cost.ahead_bytes_up,
        "bytes_all": cost.bytes_up + cost.bytes_down + cost.ahead_bytes_up,
        "clients_contacted": len(cost.clients),
        "local_steps": cost.local_steps,
        "storage_bytes": cost.storage_bytes,
    }
