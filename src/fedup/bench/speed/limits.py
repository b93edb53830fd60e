"""How far a training step is from what the machine can do: its arithmetic at the speed of a large matrix product."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import SETTINGS, Setting, even_jobs
from fedup.bench.speed.training import TimedRounds
from fedup.bench.turns import in_turns
from fedup.errors import MissingDataError
from fedup.models.cut import logits_of

# What a kernel is for, told by its name; the first that fits counts.
_KINDS = (
    ("normalisation", ("batch_norm", "layer_norm", "GammaBeta", "bn_")),
    ("convolutions and products", ("gemm", "nvjet", "cutlass", "xmma", "conv", "wgrad", "dgrad", "fprop", "sdpa")),
    ("optimizer and averaging", ("multi_tensor",)),
    ("copies and casts", ("copy", "Memcpy", "Memset", "CatArray", "nhwc", "nchw")),
    ("sums", ("reduce",)),
    ("element by element", ("elementwise", "Functor", "max_pool", "index", "gather", "scatter", "softmax", "nll")),
)


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """A step of each model over its arithmetic; on a GPU with what the time of a round goes to."""
    peaks = {precision: _peak(device, precision) for precision in ("float32", "bfloat16")}
    for setting in SETTINGS:
        tell(f"the arithmetic of {setting.title}")
        with suppress(MissingDataError):
            yield _measure_model(setting, device, peaks)


def _measure_model(setting: Setting, device: torch.device, peaks: dict[str, float]) -> Row:
    rows, clients = setting.count(device)
    rounds = TimedRounds(setting, rows, device)
    jobs = even_jobs(rows, clients, rounds.config)
    steps = sum(job.steps for job in jobs)
    rounds.run(jobs)
    step_s = in_turns({"round": lambda: rounds.run(jobs)}, device, repeats=3, warm=0).median("round") / steps
    flops = _flops(setting.build(device), rounds, jobs[0].size)
    floor_s = flops / peaks["bfloat16" if rounds.config.in_bfloat16(device) else "float32"]
    detail = {"step_s": step_s, "floor_s": floor_s, "flops": flops, "batch": jobs[0].size, "peaks": peaks}
    if device.type == "cuda":
        detail |= _kernels(lambda: rounds.run(jobs), steps)
    return Row(f"{setting.title}: a step, over its arithmetic at full speed", step_s / floor_s, "×", detail=detail)


def _peak(device: torch.device, precision: str) -> float:
    """Operations a second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / in_turns({"product": lambda: a @ b}, device, repeats=5).median("product")


def _flops(model: nn.Module, rounds: TimedRounds, batch: int) -> int:
    """Operations of the products and convolutions in one step, there and back."""
    model.train()
    with FlopCounterMode(display=False) as counter:
        cross_entropy(logits_of(model(rounds.x[:batch])), rounds.y[:batch]).backward()
    return int(counter.get_total_flops())


def _kernels(work: Callable[[], None], steps: int) -> dict[str, object]:
    """Kernels in a step, their time, and what it goes to; kernels of several clients overlap."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    microseconds: Counter[str] = Counter()
    count = 0
    for event in seen.key_averages():
        microseconds[_kind(event.key)] += event.self_device_time_total
        count += event.count
    return {
        "kernels_per_step": count / steps,
        "kernel_microseconds_per_step": {kind: time / steps for kind, time in microseconds.most_common()},
    }


def _kind(kernel: str) -> str:
    return next((kind for kind, parts in _KINDS if any(part in kernel for part in parts)), "other")
