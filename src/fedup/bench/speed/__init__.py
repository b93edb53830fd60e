"""`fedup bench speed`: what training, reading, requests and serving cost, as ratios in one run on whatever it finds."""

from collections.abc import Sequence
from typing import Any

import torch

from fedup.bench.alone import AloneCheck
from fedup.errors import SettingError
from fedup.registry import find
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress

PARTS = ("training", "growth", "limits", "extraction", "clustering", "closed_form", "serving")
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
    wanted = [part for part in (*PARTS, *ON_DEMAND) if part in (parts or PARTS)]
    settings = {"clustering": {"rows": rows, "width": width, "literal": literal}}
    check = AloneCheck(str(device))
    table: list[dict[str, Any]] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for done, part in enumerate(wanted):
            measure = find(__name__, part, needs=("measure",)).measure
            measured = measure(device, lambda what: progress(f"Measuring {what}", 0, 1), **settings.get(part, {}))
            table += [{"part": part, **row.to_json()} for row in measured]
            progress("Speed", done + 1, len(wanted))
    seen = check.finish(idle=True).to_json()
    return {"device": device.type, "table": table, "machine": describe_machine(), "code": describe_code(), **seen}
