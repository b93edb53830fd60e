"""The matrix that a page of results begins with: methods by scenarios, beside Retrain's figures and the floor's."""

from collections.abc import Sequence
from typing import Any

from fedup.bench.experiment import REFERENCE
from fedup.bench.format import show_value
from fedup.bench.metrics import Column
from fedup.bench.summary import FLOOR, ORIGINAL, Block, Figure, Row
from fedup.bench.verdicts import CLOSE, OURS

TO_GO = ("asr", "f_a", "f_a_train")  # the first of these that a block has is the figure that is to go
_NEAR, _FAR = 0.02, 0.10  # of a share: how much worse than Retrain's
_TAGS = {REFERENCE: "reference", FLOOR: "floor", ORIGINAL: "before the request"}


def figure_to_go(block: Block) -> str:
    """The key of the figure that is to go."""
    shown = {column.key for column in block.shown("accuracy")}
    return next((key for key in TO_GO if key in shown), "")


def overview(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A matrix for each federation."""
    by_federation: dict[str, list[Block]] = {}
    for block in blocks:
        by_federation.setdefault(block.federation, []).append(block)
    return [_matrix(federation, own) for federation, own in by_federation.items()]


def _matrix(federation: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """Its head by scenario, and a row for each method that applies to one of them."""
    methods = {row.method.name: row for block in blocks for row in block.rows if row.supported}
    ordered = sorted(methods.values(), key=lambda row: (row.method.name != REFERENCE, row.method.use != FLOOR))
    heads = [(block, _columns(block)) for block in blocks]
    scenarios = [
        {
            "name": f"{block.scenario.name}{' †' if block.failed_attacks else ''}",
            "title": f"{federation}, {block.scenario.name}",
            "columns": shown,
        }
        for block, shown in heads
    ]
    rows = [
        {
            "name": row.method.name,
            "tag": _TAGS.get(row.method.use, ""),
            "did": next((text for result in row.results.values() if (text := result.get("about", {}).get("did"))), ""),
            "look": "ours" if row.method.name == OURS else "anchor" if row.method.use in (REFERENCE, FLOOR) else "",
            "cells": [
                {**_cell(block, block.row(row.method.name), column), "first": column is shown[0]}
                for block, shown in heads
                for column in shown
            ],
        }
        for row in ordered
    ]
    return {"federation": federation, "scenarios": scenarios, "rows": rows}


def _columns(block: Block) -> list[Column]:
    """What is to stay, what is to go, the distance to Retrain, the attack and the clean time, where there are any."""
    shown = {c.key: c for table in ("accuracy", "closeness", "cost") for c in block.shown(table)}
    timed = any(row.figure("time") for row in block.rows)
    keys = ("r_a", figure_to_go(block), "tv", "attack_auc", *(["time"] if timed else []))
    return [shown[key] for key in keys if key in shown]


def _cell(block: Block, row: Row | None, column: Column) -> dict[str, str]:
    figure = row.figure(column.key) if row else None
    if row is None or figure is None:
        return {"text": "failed" if row and row.failures else "–", "tone": ""}
    if column.style != "share":
        return {"text": show_value(figure.mean, column), "tone": ""}
    goal = block.floor if column.key in CLOSE else block.row(REFERENCE)
    is_anchor = row.method.use in (REFERENCE, FLOOR)
    tone = "" if is_anchor or goal is None else _tone(figure, goal.figure(column.key), column)
    return {"text": f"{100 * figure.mean:.1f}", "tone": tone}


def _tone(figure: Figure, goal: Figure | None, column: Column) -> str:
    """Whether it is as good as Retrain's, or far worse."""
    if goal is None:
        return ""
    above = figure.mean - goal.mean
    worse = {"higher": -above, "lower": above}.get(column.better, abs(above))
    return "near" if worse <= _NEAR else "far" if worse > _FAR else ""
