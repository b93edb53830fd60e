"""How many threads torch computes with on a CPU: one where a batch is little work, else as many as it was given.

Threads that have nothing to do spin. On a busy machine they take the cores from the thread that they wait for, and a
small model trains a hundred times slower with two threads than with one.
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
# Multiply-adds of a batch's forward pass, below which a second thread gains little: docs/reproducibility.md.
SMALL_BATCH = 10_000_000
_fixed: ContextVar[bool] = ContextVar("fedup_threads_fixed", default=False)


def threads_for(multiply_adds: float) -> int:
    """How many threads suit a batch with so much work in its forward pass; never more than torch has now, unless the
    user asked for more."""
    chosen = asked_threads()
    if chosen is not None:
        return chosen
    return 1 if multiply_adds < SMALL_BATCH else torch.get_num_threads()


def threads_for_training(model: nn.Module, example: Tensor, batch_size: int) -> int:
    """The same for batches of rows like the one in `example`; where a GPU computes, what torch has now."""
    if example.device.type != "cpu" or torch.get_num_threads() == 1:
        return threads_for(math.inf)
    return threads_for(batch_size * _work_of_a_row(model, example))


def asked_threads() -> int | None:
    """What the user asked for, by `fixed_threads` or by the variable FEDUP_THREADS; None where they did not."""
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
    """A block of `using_threads` that has not ended."""

    before: int  # threads that torch is to have after it


_BLOCKS: list[_Block] = []
_LOCK = threading.Lock()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """So many threads inside the block; after it what torch had before, also where blocks of several Python threads
    end in another order than they began."""
    if count == torch.get_num_threads():  # a call would reset what a user set for single libraries
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
    """So many threads inside the block, whatever suits the work."""
    token = _fixed.set(True)
    try:
        with using_threads(count):
            yield
    finally:
        _fixed.reset(token)


def _work_of_a_row(model: nn.Module, example: Tensor) -> float:
    """Multiply-adds of a row's forward pass, as torch counts them, at least one for each weight."""
    probe = copy.deepcopy(model).eval()
    try:
        # With gradients: without them encoders are one fused operation, of which nothing is counted.
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            probe(example[:1])
    except Exception:  # a user's model: training will say what is wrong with it
        return math.inf
    return max(counter.get_total_flops() / 2, sum(weight.numel() for weight in probe.parameters() if weight.ndim > 1))
