"""Memory of this process."""

from pathlib import Path

STATUS = Path("/proc/self/status")


def memory_bytes(field: str) -> int:
    """What Linux tells of this process under that name."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
