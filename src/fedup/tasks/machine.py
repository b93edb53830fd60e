"""What a measurement ran on."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fedup


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, accelerator and versions, stored with every result."""
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
    """The commit of the running code, and whether files differ from it; FEDUP_COMMIT names the commit of a copy."""
    named, package = os.environ.get("FEDUP_COMMIT"), Path(fedup.__file__).parent
    if named or _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:  # a copy, or installed
        return {"commit": named or None, "changed": None}
    changed = _git(package, "status", "--porcelain", "--", str(package))
    return {"commit": _git(package, "rev-parse", "HEAD"), "changed": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, env=own)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show_commit(code: Mapping[str, Any]) -> str:
    """What `describe_code` found, in a few words."""
    return (code["commit"] or "unknown")[:7] + (" with local changes" if code["changed"] else "")
