"""Files written whole or not at all: write a new file, sync it, rename it, sync the folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedup.errors import FedUPError, StorageError

_ADVICE = {
    errno.ENOSPC: "Free some space and run the same command again; what was there before is untouched.",
    errno.EDQUOT: "Free some of your quota and run the same command again; what was there before is untouched.",
    errno.EFBIG: "The system limits the size of files here; what was there before is untouched.",
    errno.EROFS: "It lies on a read-only disk: work on a copy elsewhere.",
    errno.EACCES: "Ask for write permission there, or work on a copy elsewhere.",
    errno.EPERM: "Ask for write permission there, or work on a copy elsewhere.",
}


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file to write to; synced and renamed to `path` at the end, removed on an error.

    After a power cut `path` is the old file or the new one. A killed process may leave a `.….partial` file beside it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with explained(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that says what failed and what to do."""
    try:
        yield
    except FedUPError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the path and the disk; what was there before is untouched.")
        raise StorageError(f"Could not {what}: {error.strerror or error}. {advice}") from error
