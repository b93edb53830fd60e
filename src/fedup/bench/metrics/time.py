"""Time from request to effect."""

from typing import Any

from fedup.bench.case import Case
from fedup.bench.metrics import Column
from fedup.bench.probe import reached

COLUMNS = (
    Column("time", "time", "Seconds from request to the final model.", "cost", "lower", "seconds", order=1, timed=True),
    Column(
        "time_to_effect",
        "time to effect",
        "Seconds until R-A is at most 1 point below Retrain's and F-A (backdoors: ASR) at most 1 point above.",
        "cost",
        "lower",
        "seconds",
        order=2,
        timed=True,
    ),
    Column(
        "ahead_time",
        "time ahead",
        "Seconds of work before any request, once a federation.",
        "cost",
        "lower",
        "seconds",
        order=3,
        timed=True,
    ),
)


def measure(case: Case) -> dict[str, Any]:
    """In all, by stage, until the effect, and what was needed ahead of the request."""
    cost = case.unlearned.cost
    return {
        "time": cost.total_time_s,
        "time_by_stage": cost.time_s,
        "time_to_effect": reached(case),
        "ahead_time": cost.ahead_time_s,
    }
