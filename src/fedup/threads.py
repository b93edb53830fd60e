"""How many threads torch uses on a CPU: one for a batch of little work, else all it has.

Idle threads spin. On a busy machine they take the cores from the thread that they wait for: a small model can train a
hundred times slower with two threads than with one.
"""

import copy
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedup.errors import SettingError

VARIABLE = "FEDUP_THREADS"
# Multiply-adds in a batch's forward pass; below this a second thread gains little (docs/reproducibility.md).
SMALL_BATCH = 10_000_000
_fixed: ContextVar[bool] = ContextVar("fedup_threads_fixed", default=False)


def threads_for(multiply_adds: float) -> int:
    """The user's number of threads, or one for a batch of little work, else what torch has now."""
    suited = 1 if multiply_adds < SMALL_BATCH else torch.get_num_threads()
    return asked_threads() or suited


def threads_for_training(model: nn.Module, example: Tensor, batch_size: int) -> int:
    """The same for batches of rows like `example`; on a GPU what torch has now."""
    if example.device.type != "cpu" or torch.get_num_threads() == 1:
        return threads_for(math.inf)
    return threads_for(batch_size * _work_of_a_row(model, example))


def asked_threads() -> int | None:
    """The number set by `fixed_threads` or by the variable FEDUP_THREADS; None if neither is set."""
    if _fixed.get():
        return torch.get_num_threads()
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{VARIABLE} must be a whole number of threads, 1 or more; found {text}.")
    return int(text)


@dataclass(eq=False)
class _Block:
    """An open block of `using_threads`."""

    before: int  # threads to set when it ends


_BLOCKS: list[_Block] = []
_LOCK = threading.Lock()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """`count` threads inside the block, the former number after it; blocks of several Python threads may end in any
    order."""
    if count == torch.get_num_threads():  # setting it would reset what a user set for single libraries
        yield
        return
    with _LOCK:
        block = _Block(torch.get_num_threads())
        _BLOCKS.append(block)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _LOCK:
            place = _BLOCKS.index(block)
            if place + 1 < len(_BLOCKS):
                _BLOCKS[place + 1].before = block.before
            else:
                torch.set_num_threads(block.before)
            del _BLOCKS[place]


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """`count` threads inside the block, whatever the work."""
    token = _fixed.set(True)
    try:
        with using_threads(count):
            yield
    finally:
        _fixed.reset(token)


def _work_of_a_row(model: nn.Module, example: Tensor) -> float:
    """Multiply-adds in a row's forward pass by torch's count; at least one per weight."""
    probe = copy.deepcopy(model).eval()
    try:
        # Without gradients encoders run as one fused operation, which is not counted.
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            probe(example[:1])
    except Exception:  # the user's model may raise anything; training will report it
        return math.inf
    return max(counter.get_total_flops() / 2, sum(weight.numel() for weight in probe.parameters() if weight.ndim > 1))
