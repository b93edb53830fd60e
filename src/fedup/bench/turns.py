"""Times are compared in turns, so that drift affects all pieces of work alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of several pieces of work, run in turns."""

    of: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.of[name])

    def medians(self) -> dict[str, float]:
        """For a row's detail: `{name}_s`."""
        return {f"{name}_s": self.median(name) for name in self.of}

    def ratio(self, name: str, to: str) -> float:
        """The median over turns of one time over another."""
        return statistics.median(a / b for a, b in zip(self.of[name], self.of[to], strict=True))


def in_turns(work: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int, warm: int = 1) -> Times:
    """Run all pieces again and again, each turn in another order; `warm` turns come first and do not count."""
    times: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(warm + repeats):
        for name in names if turn % 2 else reversed(names):
            seconds = clocked(work[name], device)
            if turn >= warm:
                times[name].append(seconds)
    return Times(times)


def clocked(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work is done, on the device too."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
