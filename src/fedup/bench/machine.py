"""What a measurement ran on."""

import os
import platform
from pathlib import Path

import torch

import fedup


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, accelerator and versions, to be kept with every result."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedup": fedup.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
