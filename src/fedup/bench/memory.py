"""Memory of this process, and the peak of collecting and answering in a process of its own."""

import multiprocessing
from pathlib import Path

from fedup.bench.synthetic import feature_federation
from fedup.clients.collect import collect
from fedup.request import Forget
from fedup.serving.plugged import plug
from fedup.unlearning.unlearn import unlearn

STATUS = Path("/proc/self/status")


def peak_memory_ratio(*, rows: int, width: int) -> float:
    """Peak above the level with the features loaded, over the size of the feature array; NaN where Linux is not."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return float(pool.apply(_measure, (rows, width)))


def _measure(rows: int, width: int) -> float:
    if not STATUS.exists():
        return float("nan")
    small, small_model = feature_federation(rows=2000, width=width)  # libraries allocate on first use
    unlearn(plug(small_model), collect(small_model, small), Forget.classes([3]), force=True)
    federation, model = feature_federation(rows=rows, width=width)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present level
    level = memory_bytes("VmRSS")
    centroids = collect(model, federation)
    unlearn(plug(model), centroids, Forget.classes([3]), force=True)
    return (memory_bytes("VmHWM") - level) / (rows * width * 4)


def memory_bytes(field: str) -> int:
    """What Linux tells of this process under that name."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
