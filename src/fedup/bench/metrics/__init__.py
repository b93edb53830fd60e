"""Metrics, one file each: a function `measure(case)` and the `COLUMNS` that tables show of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from fedup.bench.case import Case
from fedup.registry import find, names

Better = Literal["higher", "lower", "retrain", "neither"]  # "retrain": the closer to Retrain's value, the better


@dataclass(frozen=True)
class Column:
    """One figure of a metric: where a result keeps it, and how a table shows it."""

    key: str
    title: str
    about: str  # one sentence for the reader
    table: Literal["accuracy", "closeness", "cost"]
    better: Better = "neither"
    style: Literal["share", "points", "seconds", "bytes", "count", "ratio", "number", "yes"] = "share"
    order: int = 100  # where among all columns
    timed: bool = False  # made of seconds: only a clean time counts, as `fedup bench time` takes it


class Metric(Protocol):
    """What a metric's file defines."""

    COLUMNS: Sequence[Column]

    def measure(self, case: Case) -> dict[str, Any]:
        """Figures by key; None where a figure has no meaning for the case."""


def metric(name: str) -> Metric:
    """The metric of that name."""
    return find(__name__, name, needs=("measure", "COLUMNS"))


def columns() -> list[Column]:
    """The columns of all metrics, in the order in which tables show them."""
    found = [column for name in names(__name__) for column in metric(name).COLUMNS]
    return sorted(found, key=lambda column: column.order)


def columns_of(*keys: str) -> list[Column]:
    """The columns of these figures, in this order."""
    by_key = {column.key: column for column in columns()}
    return [by_key[key] for key in keys if key in by_key]


@cache
def timed_keys() -> frozenset[str]:
    """The figures that are made of seconds."""
    return frozenset(column.key for column in columns() if column.timed)
