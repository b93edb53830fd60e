"""A busy machine: how busy it is, and what helps. Loads no torch, since part of it must happen before."""

import os
import sys

_CHOSEN_BY_THE_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def load_above_cores() -> str | None:
    """How busy the machine is, in words, where more processes want a core than there are; else None."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return None
    cores = os.cpu_count() or 1
    return f"load {load:.1f} on {cores} cores" if load > cores else None


def let_threads_sleep() -> None:
    """On a busy machine torch's threads sleep while they wait, in place of spinning; no bit depends on it.

    OpenMP reads this once, when torch is loaded. On an idle machine spinning is faster, so there nothing is changed.
    """
    chosen = any(name in os.environ for name in _CHOSEN_BY_THE_USER)
    if "torch" not in sys.modules and not chosen and load_above_cores():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
