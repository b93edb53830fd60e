"""`fedup bench speed`: what training, reading, requests and serving cost, as ratios in one run on whatever it finds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fedup.bench.alone import AloneCheck
from fedup.bench.speed import clustering, extraction, growth, limits, precision, serving, training
from fedup.bench.speed._rows import Measure
from fedup.errors import SettingError
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress

PARTS = ("training", "growth", "limits", "extraction", "clustering", "serving")
ON_DEMAND = ("precision",)  # takes minutes, a GPU and real data


def run_speed(
    *,
    device: torch.device,
    progress: Progress,
    parts: Sequence[str] = (),
    rows: int = 50_000,
    width: int = 512,
    literal: bool = False,
) -> dict[str, Any]:
    """Measure the parts named, or all but those on demand; the result is plain data."""
    unknown = sorted(set(parts) - {*PARTS, *ON_DEMAND})
    if unknown:
        raise SettingError(f"There is no part {unknown[0]!r}; there are {', '.join((*PARTS, *ON_DEMAND))}.")
    measures: dict[str, Measure] = {
        "training": training.measure,
        "growth": growth.measure,
        "limits": limits.measure,
        "extraction": extraction.measure,
        "clustering": partial(clustering.measure, rows=rows, width=width, literal=literal),
        "serving": serving.measure,
        "precision": precision.measure,
    }
    wanted = [part for part in measures if part in (parts or PARTS)]
    check = AloneCheck(str(device))
    table: list[dict[str, Any]] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for done, part in enumerate(wanted):
            measured = measures[part](device, lambda what: progress(f"Measuring {what}", 0, 1))
            table += [{"part": part, **row.to_json()} for row in measured]
            progress("Speed", done + 1, len(wanted))
    seen = check.finish(idle=True).to_json()
    return {"device": device.type, "table": table, "machine": describe_machine(), "code": describe_code(), **seen}
