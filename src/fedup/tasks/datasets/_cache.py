"""Arrays decoded once, then memory-mapped from a cache folder outside of every project."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedup.errors import StorageError
from fedup.files import replacing, write_text
from fedup.run.store import hash_of

_VERSION = 1  # raise it when decoding changes
_CONTENT = "content.json"  # names and hashes of the arrays; written last


def cache_folder() -> Path:
    """`FEDUP_CACHE`, or the user's cache folder."""
    own = os.environ.get("FEDUP_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fedup")


def cached(source: Path, what: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `make` decodes from a file, from the cache if possible; a changed file is decoded again."""
    stat = source.stat()
    key = f"{_VERSION}|{source.absolute()}|{stat.st_size}|{stat.st_mtime_ns}|{what}"
    try:
        folder = cache_folder() / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    except RuntimeError:  # there is no home folder
        return make()
    with suppress(Exception):  # a damaged cache is made again
        content = json.loads((folder / _CONTENT).read_text(encoding="utf-8"))
        if all(hash_of(folder / f"{name}.npy")[0] == digest for name, digest in content.items()):
            return {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in content}
    arrays = make()
    with suppress(StorageError):  # works without a cache, too
        for name, array in arrays.items():
            with replacing(folder / f"{name}.npy") as partial, partial.open("wb") as file:
                np.save(file, array)
        write_text(folder / _CONTENT, json.dumps({name: hash_of(folder / f"{name}.npy")[0] for name in arrays}))
    return arrays
