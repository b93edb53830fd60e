"""What a measurement ran on."""

import os
import platform
import subprocess
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


def describe_code() -> dict[str, str | bool | None]:
    """The commit that fedup runs from, and whether files differ from it; without git, what FEDUP_COMMIT says."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": os.environ.get("FEDUP_COMMIT"), "changed": None}
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--", str(folder)))}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
