"""One writer at a time: an flock on a file of the folder, which ends with its process."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedup.errors import BusyError, SettingError
from fedup.files import explained

_RETRY_S = 0.05
_MIN_WAIT_S = 0.3  # a reader that looks for the holder (`holder`) holds the lock for a moment


@contextmanager
def held(
    path: Path, command: str, *, wait_s: float = 0.0, on_wait: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Hold the lock inside; waits up to `wait_s` seconds for another holder, then raises and names it."""
    if not wait_s >= 0:
        raise SettingError(f"Seconds to wait must be 0 or more; found {wait_s}.")
    with explained(f"lock {path}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(handle, path, wait_s, on_wait)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        _describe(handle, {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": since})
        try:
            yield
        finally:
            _describe(handle, None)
    finally:
        os.close(handle)


def holder(path: Path) -> str | None:
    """The process that writes to the folder now, in words; None when there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(path)
    except OSError:
        pass
    finally:
        os.close(handle)
    return None


def _acquire(handle: int, path: Path, wait_s: float, on_wait: Callable[[str], None]) -> None:
    deadline = time.monotonic() + max(wait_s, _MIN_WAIT_S)  # not by the wall clock, which may jump
    announced = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            who = _who(path)
        if time.monotonic() >= deadline:
            raise BusyError(
                f"{who} is writing to {path.parent}. Nothing was changed: run the command again when it is done, or "
                "wait longer with --wait SECONDS."
            )
        if not announced and time.monotonic() >= deadline - wait_s:
            on_wait(who)
            announced = True
        time.sleep(_RETRY_S)


def _describe(handle: int, who: dict[str, object] | None) -> None:
    with explained("note who holds the lock"):
        os.ftruncate(handle, 0)
        if who is not None:
            os.pwrite(handle, json.dumps(who).encode(), 0)


def _who(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        return f"`fedup {who['command']}` (process {who['pid']} on {who['host']}, since {who['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "Another process"
