"""Real commands in forked children that can be killed anywhere, and what a folder must look like afterwards.

Starting an interpreter with torch takes seconds, so the tests' own process loads all of it once and forks: a child is
a whole process of its own, with the real `fedup.cli.main`, and costs what its command costs.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fedup.cli import main
from fedup.cli._app import app
from fedup.cli._session import Session
from fedup.errors import MissingRunError
from fedup.run.folder import Run
from fedup.run.state import State
from fedup.run.verify import verify

DEADLINE_S = 120.0  # a command here takes under a second: one that takes this long hangs
_CRASHED = 70  # exit code of a child that left by an exception, which no command may

# A small federation: all a command does, in under a second.
TRAIN = ("train", "--rounds", "2", "--rows", "300", "--clients", "3", "--partition", "iid")
COLLECT = ("collect",)
ANY_LOSS = ("--force", "--max-class-loss", "100")  # what a filter of so few steps costs is not the question here
FIT = ("--steps", "10", *ANY_LOSS)
CLASS = ("unlearn", "--class", "7", *FIT)
SWEEP = COLLECT  # done before: takes the lock, removes leftovers, and changes nothing


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or minus the signal that ended it, and what it said."""

    code: int
    out: str
    err: str


class Child:
    """A command running in a forked process."""

    def __init__(self, *args: str | Path, prepare: Callable[[], None] = lambda: None) -> None:
        self._out, self._err = _Said(), _Said()
        self._ended: Ended | None = None
        self._started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._run([str(arg) for arg in args], prepare)
        self._out.only_read()
        self._err.only_read()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; a child that has ended already is not waited for yet, so its id is still its own."""
        if self._ended is None:
            os.kill(self.pid, number)

    def wait(self, deadline_s: float = DEADLINE_S) -> Ended:
        """How it ended; a child that hangs is killed, and the test with it."""
        while self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.reaped(os.waitstatus_to_exitcode(status))
            elif time.monotonic() - self._started > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.reaped(-signal.SIGKILL)
                raise AssertionError(f"A command hung: {self._ended}")
            else:
                time.sleep(0.001)
        return self._ended

    def reaped(self, code: int) -> None:
        """Note how it ended, for whoever waited for it elsewhere."""
        self._ended = Ended(code, self._out.read(), self._err.read())

    def _run(self, args: list[str], prepare: Callable[[], None]) -> None:
        """In the child; never returns."""
        code: object = _CRASHED
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(self._out.end, 1)
            os.dup2(self._err.end, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = ["fedup", *args]
            torch.set_num_threads(1)  # other threads do not survive a fork
            prepare()
            main()
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)


def besides_progress(text: str) -> list[str]:
    """Lines that do not tell how far a command is."""
    return [line for line in text.splitlines() if not re.search(r" …$|: round \d+ of \d+", line)]


def run(*args: str | Path, prepare: Callable[[], None] = lambda: None) -> Ended:
    """A command, to its end."""
    with Child(*args, prepare=prepare) as child:
        return child.wait()


def succeed(*args: str | Path) -> Ended:
    """A command that must succeed."""
    ended = run(*args)
    assert ended.code == 0, (args, ended)
    return ended


def signalled_at(folder: Path, point: int, number: int) -> Callable[[], None]:
    """Something to do in a child: get a signal at the `point`-th time that Python touches a changed folder."""
    seen, last, busy = 0, None, False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen, last, busy
        if busy or not any(_names(folder, arg) for arg in args):
            return
        busy = True  # looking is an event too
        now = _glance(folder)
        busy = False
        if now != last:
            last, seen = now, seen + 1
            if seen == point:
                os.kill(os.getpid(), number)

    return lambda: sys.addaudithook(hook)


def _names(folder: Path, argument: Any) -> bool:
    """Whether an argument of an audit event is a path, an address or an open file in the folder."""
    if isinstance(argument, int) and argument > 2:
        try:
            argument = Path(f"/proc/self/fd/{argument}").readlink()
        except OSError:
            return False
    return isinstance(argument, str | bytes | Path) and str(folder) in os.fsdecode(argument)


def _glance(folder: Path) -> list[tuple[str, int, int]]:
    paths = [folder, *folder.rglob("*")] if folder.exists() else []
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


class _Said:
    """What a child says, in a pipe: a full disk or a limit on files does not silence it."""

    def __init__(self) -> None:
        self._start, self.end = os.pipe()

    def only_read(self) -> None:
        os.close(self.end)

    def read(self) -> str:
        """All of it, after the child's end; another child may hold the other end open, so nothing waits for that."""
        os.set_blocking(self._start, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._start, 1 << 16):
                said += more
        os.close(self._start)
        return said.decode()


@dataclass(frozen=True)
class Look:
    """What a folder says of itself, without the clock; None in place of a Look means that there is no run folder."""

    events: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    in_force: tuple[tuple[str, str], ...]


def look(path: Path) -> Look | None:
    """Events, files by their hashes, and requests in force."""
    try:
        state: State = Run(path).read()
    except MissingRunError:
        return None
    return Look(
        tuple(event.kind for event in state.events),
        tuple((file.name, file.sha256) for file in state.files),
        tuple((request.id, request.forget.digest) for request in state.active),
    )


def check_sound(path: Path) -> None:
    """The folder verifies, and its overview can be shown to people and to programs."""
    session = Session(path)
    checks = verify(session.run, session.blank, session.probe)
    assert checks, path
    assert [check for check in checks if check.ok is False] == []
    # Found here: status failed on the journal without events that a kill in the first moments of a training leaves.
    for arguments in (["status"], ["status", "--json"]):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            app([*arguments, "--run", str(path)], standalone_mode=False)
        assert said.getvalue()


def check_tidy(path: Path) -> None:
    """Nothing lies in the folder but what its last event needs."""
    # Found here: safetensors writes to a `.tmp…` of its own first, which a kill left behind for good, with all that a
    # later purge promises to have destroyed.
    state = Run(path).read()
    needed = {file.name for file in state.files}
    found = {entry.name for entry in (path / "files").iterdir()}
    assert found == needed, f"left over: {sorted(found - needed)}, missing: {sorted(needed - found)}"
    others = {entry.name for entry in path.iterdir()} - {"run.sqlite", "files", "lock", "retrain.lock"}
    assert not others, f"left over: {sorted(others)}"
    assert (path / "lock").read_bytes() == b""  # nobody is said to hold it


def copy(source: Path, target: Path) -> Path:
    """A copy of a folder; of one that is not there, none."""
    if source.exists():
        shutil.copytree(source, target)
    return target


def content(path: Path) -> str:
    """A hash of all that a folder holds; the ids of processes, in names and in the lock, do not count."""
    digest = sha256()
    for entry in sorted(path.rglob("*")):
        name = re.sub(r"\d+\.partial$", "partial", str(entry.relative_to(path)))
        digest.update(f"\0{name}\0".encode())
        if entry.is_file() and name != "lock":
            digest.update(sha256(entry.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class Step:
    """A command, the folder it starts from, the states it may leave behind when killed, and the one it ends in."""

    name: str
    args: tuple[str, ...]
    start: Path
    before: tuple[Look | None, ...]
    after: Look
    once: bool = False  # done again after its end, it would do more; killed at its end, it leaves its rounds there

    def check_killed(self, folder: Path, scratch: Path) -> None:
        """The folder opens, is before or after the step and verifies. Looked at in a copy: it stays as it was left."""
        seen = copy(folder, scratch)
        found = look(seen)
        assert found in (*self.before, self.after), f"neither before nor after the step: {found}"
        if found is not None:
            check_sound(seen)
        shutil.rmtree(scratch, ignore_errors=True)

    def check_rerun(self, folder: Path) -> None:
        """The same command once more completes the step, to the same bits. Nobody holds the lock any more."""
        done = self.once and look(folder) == self.after and not [*folder.glob("training/continue-*")]
        succeed(*(SWEEP if done else self.args), "--run", folder, "--wait", "0")
        assert look(folder) == self.after, f"{look(folder)} instead of {self.after}"
        check_sound(folder)
        check_tidy(folder)


STEPS = (
    *("train", "collect", "unlearn-class", "unlearn-samples", "restore-one", "restore-last", "purge"),
    *("more-rounds", "retrain"),
)


class Folders:
    """Folders after each step of one history, made once, to copy and go on from."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.none, self.trained, self.collected = home / "none", home / "trained", home / "collected"
        self.one, self.two = home / "one", home / "two"
        for words, start, end in (
            (TRAIN, self.none, self.trained),
            (COLLECT, self.trained, self.collected),
            (CLASS, self.collected, self.one),
        ):
            copy(start, end)
            # In this process, so that what is loaded on first use is loaded before the forks.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                app([*words, "--run", str(end)], standalone_mode=False)
        self.samples = ("unlearn", "--samples", f"1:{self._sample(client=1)}", *FIT)
        copy(self.one, self.two)
        succeed(*self.samples, "--run", self.two)
        self._steps: dict[str, Step] = {}

    def _sample(self, client: int) -> int:
        """The id of a row that a client was trained on, of a class that no other request forgets."""
        federation = Session(self.trained).federation
        rows = federation.clients[client].train
        return next(int(row) for row in rows if int(federation.y[row]) != 7)

    def step(self, name: str) -> Step:
        """A step with its reference: an undisturbed run in a child."""
        if name not in self._steps:
            words, start = {
                "train": (TRAIN, self.none),
                "collect": (COLLECT, self.trained),
                "unlearn-class": (CLASS, self.collected),
                "unlearn-samples": (self.samples, self.one),
                "restore-one": (("restore", "R2", *ANY_LOSS), self.two),
                "restore-last": (("restore", "R1"), self.one),
                "purge": (("purge", "--yes"), self.one),
                "more-rounds": (("train", "--more-rounds", "2", *ANY_LOSS), self.one),
                "retrain": (("retrain", "--force"), self.one),
            }[name]
            end = copy(start, self.home / f"after-{name}")
            succeed(*words, "--run", end)
            after = look(end)
            assert after is not None and after != look(start)
            check_sound(end)
            check_tidy(end)
            before: tuple[Look | None, ...] = (look(start),)
            if name == "train":  # it makes the folder first, which is a step of its own
                before = (None, Look((), (), ()), Look(("created",), (), ()))
            self._steps[name] = Step(name, words, start, before, after, once=name == "more-rounds")
        return self._steps[name]
