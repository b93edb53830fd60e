"""Whether a measurement had its device to itself: times taken on a shared device do not count."""

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_CONTEXT_BYTES = 3 * 2**30  # what a process's own CUDA context and captured graphs take beside its tensors
_IDLE_S, _LOOKS = 0.6, 3  # the driver's measure of utilisation looks back up to a second: own work may be in the first
_BUSY_GPU = 5  # percent of utilisation while this process does nothing
_BUSY_CORES = 0.15  # of all cores, used by others: more slows down what is timed on a CPU
_BUSY_HOST = 0.5  # the same for a GPU, which needs but one core to be free
_LEAST_S = 0.5  # below it the kernel's counts of CPU time are too coarse


@dataclass(frozen=True)
class Alone:
    """Whether nobody else used a device (None: could not be checked), and the evidence."""

    alone: bool | None
    seen: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as stored in results."""
        return {"alone": self.alone, "seen": self.seen}

    @property
    def others(self) -> str:
        """Signs of other users, in words; empty if there are none."""
        return "; ".join(self.seen.get("others", []))


class AloneCheck:
    """Checks a device before and after a measurement."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._before = _look(self._device, idle=False)
        self._started = _cpu_now()

    def finish(self, *, idle: bool = False) -> Alone:
        """Alone means: no sign of others before, during or after. With `idle` this process waits a moment first: a GPU
        that is still busy then works for somebody else."""
        if idle:
            time.sleep(max(0.0, _LEAST_S - (time.perf_counter() - self._started.at)))
        cores = _others_cores(self._started, _cpu_now())
        after = _look(self._device, idle=idle)
        return _judge(self._device, [self._before, after], cores)


def look_once(device: str) -> Alone:
    """Whether a device is idle now; takes a second."""
    return AloneCheck(device).finish(idle=True)


def _judge(device: torch.device, looks: list[dict[str, Any]], cores: float | None) -> Alone:
    on_gpu, all_cores = device.type == "cuda", _cores()
    seen: dict[str, Any] = {}
    others = []
    for name, most, words in (
        ("processes", 1, "{} processes on the GPU"),
        ("utilization", _BUSY_GPU, "the GPU is used at {} % while this process waits"),
        ("foreign_bytes", _CONTEXT_BYTES, "{} bytes of the GPU's memory are somebody else's"),
    ):
        values = [look[name] for look in looks if look.get(name) is not None]
        if values:
            seen[name] = max(values)
            if max(values) > most:
                others.append(words.format(max(values)))
    load = max((look["load"] for look in looks if look["load"] is not None), default=None)
    seen |= {"load": load, "cores": all_cores}
    if cores is not None:
        seen["others_cores"] = round(cores, 2)
        if cores > all_cores * (_BUSY_HOST if on_gpu else _BUSY_CORES):
            others.append(f"others keep {cores:.1f} of {all_cores} cores busy")
    seen["others"] = others
    looked = "foreign_bytes" in seen if on_gpu else cores is not None
    return Alone(False if others else (True if looked else None), seen)


def _look(device: torch.device, *, idle: bool) -> dict[str, Any]:
    """Load and GPU state now; None for what cannot be read."""
    seen: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    if device.type != "cuda":
        return seen
    torch.cuda.synchronize(device)
    if idle:
        seen["utilization"] = _utilization(device)
    listed = _smi(device, "--query-compute-apps=pid")
    # this process is one of them, under whatever number it has outside of a container; an empty list hides all
    seen["processes"] = len(listed) if listed else None
    free, total = torch.cuda.mem_get_info(device)
    seen["foreign_bytes"] = max(0, total - free - torch.cuda.memory_reserved(device))
    return seen


def _utilization(device: torch.device) -> int | None:
    """Percent at which the GPU is used while this process waits."""
    seen: list[int] = []
    while len(seen) < _LOOKS and (not seen or min(seen) > _BUSY_GPU):
        time.sleep(_IDLE_S)
        answer = _smi(device, "--query-gpu=utilization.gpu")
        if not answer or not answer[0].isdigit():
            break
        seen.append(int(answer[0]))
    return min(seen, default=None)


def _smi(device: torch.device, query: str) -> list[str] | None:
    """The output lines of `nvidia-smi` for one GPU; None if it is missing or fails."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    try:
        done = subprocess.run(
            ["nvidia-smi", *which, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else None


@dataclass(frozen=True)
class _Cpu:
    at: float
    own_s: float
    busy_s: float | None  # of the whole machine


def _cpu_now() -> _Cpu:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return _Cpu(time.perf_counter(), own, _busy_s())


def _stat() -> list[list[str]]:
    """The kernel's CPU time, total and per core; empty if it is not available."""
    try:
        return [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return []


def _cores() -> int:
    """Cores of the machine; a container may be limited to fewer."""
    return max(0, len(_stat()) - 1) or os.cpu_count() or 1


def _busy_s() -> float | None:
    """Seconds of work of all cores together; None if the kernel does not report them."""
    counts = _stat()[:1]
    if not counts or len(counts[0]) < 8:
        return None
    user, nice, system, _, _, irq, softirq = map(int, counts[0][1:8])  # idle and waiting for disks are no work
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") or None


def _others_cores(first: _Cpu, last: _Cpu) -> float | None:
    """Cores kept busy by other processes between two moments; estimated from the load average if need be."""
    elapsed = last.at - first.at
    if first.busy_s is None or last.busy_s is None:
        return max(0.0, os.getloadavg()[0] - torch.get_num_threads())
    if elapsed < _LEAST_S:
        return None
    return max(0.0, (last.busy_s - first.busy_s - (last.own_s - first.own_s)) / elapsed)
