"""Whether a measurement had its device to itself: times of a shared one say nothing of a method."""

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
    """Whether a device was alone (None where nothing could be seen), and what was seen."""

    alone: bool | None
    seen: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As results keep it."""
        return {"alone": self.alone, "seen": self.seen}

    @property
    def others(self) -> str:
        """Who else is there, in words; empty where nobody is."""
        return "; ".join(self.seen.get("others", []))


class AloneCheck:
    """Looks at a device before something is measured there, and after it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._before = _look(self._device, idle=False)
        self._started = _cpu_now()

    def finish(self, *, idle: bool = False) -> Alone:
        """The device was alone if nobody else was seen before, meanwhile and after. With `idle` this process waits a
        moment: a GPU that is busy then is busy for somebody else."""
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
    """What can be seen at one moment; None where it cannot."""
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
    """The lines of an answer of the driver's tool about one GPU; None where there is none."""
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
    """The kernel's counts of CPU time, of all cores together and of each; none where it does not tell."""
    try:
        return [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return []


def _cores() -> int:
    """As many as the kernel counts CPU time for; a container may have fewer of its own."""
    return max(0, len(_stat()) - 1) or os.cpu_count() or 1


def _busy_s() -> float | None:
    """Seconds that all cores together have worked; None where the kernel does not tell."""
    counts = _stat()[:1]
    if not counts or len(counts[0]) < 8:
        return None
    user, nice, system, _, _, irq, softirq = map(int, counts[0][1:8])  # idle and waiting for disks are no work
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") or None


def _others_cores(first: _Cpu, last: _Cpu) -> float | None:
    """Cores that other processes kept busy between two moments; by the load average where nothing better is told."""
    elapsed = last.at - first.at
    if first.busy_s is None or last.busy_s is None:
        return max(0.0, os.getloadavg()[0] - torch.get_num_threads())
    if elapsed < _LEAST_S:
        return None
    return max(0.0, (last.busy_s - first.busy_s - (last.own_s - first.own_s)) / elapsed)
