"""Decoded once, memory-mapped afterwards: arrays in a cache folder outside of every project."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedup.errors import StorageError
from fedup.files import replacing

_VERSION = 1  # of what decoding makes: raise it when that changes


def cache_folder() -> Path:
    """`FEDUP_CACHE`, or the user's cache folder."""
    own = os.environ.get("FEDUP_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fedup")


def cached(source: Path, what: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `make` decodes from a file, or the cache's; a file that changed is decoded anew."""
    stat = source.stat()
    key = f"{_VERSION}|{source.absolute()}|{stat.st_size}|{stat.st_mtime_ns}|{what}"
    folder = cache_folder() / hashlib.sha256(key.encode()).hexdigest()[:32]
    with suppress(OSError, ValueError, EOFError):  # a cache that cannot be read is made again
        paths = sorted(folder.glob("*.npy"))
        if (folder / "complete").exists():
            return {path.stem: np.load(path, mmap_mode="c") for path in paths}
    arrays = make()
    with suppress(StorageError, OSError):  # a cache that cannot be written is done without
        for name, array in arrays.items():
            with replacing(folder / f"{name}.npy") as partial, partial.open("wb") as file:
                np.save(file, array)
        (folder / "complete").touch()
    return arrays
