"""Real commands in forked children that can be killed anywhere, and what a folder must look like afterwards.

Starting an interpreter with torch takes seconds, so the tests' own process loads all of it once and forks: a child is
a whole process of its own, with the real `fedup.cli.main`, and costs what its command costs.
"""

import contextlib
import ctypes
import io
import os
import re
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

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
TRAIN = ("train", "--rounds", "3", "--rows", "300", "--clients", "3", "--partition", "iid")
COLLECT = ("collect",)
FIT = ("--steps", "40", "--force")  # by force: what a filter of so few steps costs is not the question here
CLASS = ("unlearn", "--class", "7", *FIT)


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or minus the signal that ended it, and what it said."""

    code: int
    out: str
    err: str
    seconds: float


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
        seconds = time.monotonic() - self._started
        self._ended = Ended(code, self._out.read(), self._err.read(), seconds)

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


def run(*args: str | Path, prepare: Callable[[], None] = lambda: None) -> Ended:
    """A command, to its end."""
    with Child(*args, prepare=prepare) as child:
        return child.wait()


def succeed(*args: str | Path) -> Ended:
    """A command that must succeed."""
    ended = run(*args)
    assert ended.code == 0, (args, ended)
    return ended


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
    others = {entry.name for entry in path.iterdir()} - {"run.sqlite", "files", "lock"}
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
    seconds: float

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
        succeed(*self.args, "--run", folder, "--wait", "0")
        assert look(folder) == self.after, f"{look(folder)} instead of {self.after}"
        check_sound(folder)
        check_tidy(folder)


STEPS = ("train", "collect", "unlearn-class", "unlearn-samples", "restore-one", "restore-last", "purge")


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
        """A step with its reference: an undisturbed run in a child, which is timed."""
        if name not in self._steps:
            words, start = {
                "train": (TRAIN, self.none),
                "collect": (COLLECT, self.trained),
                "unlearn-class": (CLASS, self.collected),
                "unlearn-samples": (self.samples, self.one),
                "restore-one": (("restore", "R2", "--force"), self.two),
                "restore-last": (("restore", "R1"), self.one),
                "purge": (("purge", "--yes"), self.one),
            }[name]
            end = copy(start, self.home / f"after-{name}")
            seconds = succeed(*words, "--run", end).seconds
            after = look(end)
            assert after is not None and after != look(start)
            check_sound(end)
            check_tidy(end)
            before: tuple[Look | None, ...] = (look(start),)
            if name == "train":  # it makes the folder first, which is a step of its own
                before = (None, Look((), (), ()), Look(("created",), (), ()))
            self._steps[name] = Step(name, words, start, before, after, seconds)
        return self._steps[name]


# System calls that change files, on x86-64: what SQLite and safetensors do shows only here.
_BY_HANDLE = {1: "write", 18: "pwrite64", 20: "writev", 40: "sendfile", 77: "ftruncate", 285: "fallocate",
              296: "pwritev", 326: "copy_file_range"}  # fmt: skip
_BY_PATH = {2: "open", 76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink"}
_BY_PATH_AT = {257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 316: "renameat2"}
_TRACEME, _POKEUSER, _CONT, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 6, 7, 0x4200, 0x420E
_CALL_NUMBER, _CALL_RESULT = 8 * 15, 8 * 10  # where orig_rax and rax lie
_TRACESECCOMP, _EXITKILL, _EVENT_SECCOMP = 0x80, 0x100000, 7
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_FILTER, _RET_TRACE, _RET_ALLOW = 38, 22, 2, 0x7FF00000, 0x7FFF0000
_libc = ctypes.CDLL(None, use_errno=True)


def can_trace() -> bool:
    """Whether system calls of a child can be stopped at on this machine."""
    return sys.platform == "linux" and os.uname().machine == "x86_64" and _trial_of_tracing()


class TracedChild(Child):
    """A command that stops before each system call that would change a folder, or, on demand, open a file there."""

    def __init__(self, *args: str | Path, folder: Path, at_reads: bool = False) -> None:
        super().__init__(*args, prepare=_ask_to_be_traced)
        self._folder, self._at_reads = str(folder).encode(), at_reads
        _, status = os.waitpid(self.pid, 0)
        assert os.WIFSTOPPED(status), status
        _ptrace(_SETOPTIONS, self.pid, 0, _TRACESECCOMP | _EXITKILL)

    def stops(self) -> Iterator[str]:
        """The calls that would change the folder, each before it happens; at the end the child has ended."""
        number = 0
        while True:
            _ptrace(_CONT, self.pid, 0, number)
            _, status = os.waitpid(self.pid, 0)
            if not os.WIFSTOPPED(status):
                self.reaped(os.waitstatus_to_exitcode(status))
                return
            number = os.WSTOPSIG(status)  # a signal, to be passed on
            if status >> 8 == signal.SIGTRAP | _EVENT_SECCOMP << 8:
                number, call = 0, self._change()
                if call is not None:
                    yield call

    def refuse(self, error: int) -> None:
        """Have the call it stopped at fail instead of happening."""
        _ptrace(_POKEUSER, self.pid, _CALL_NUMBER, -1)
        _ptrace(_POKEUSER, self.pid, _CALL_RESULT, -error)

    def _change(self) -> str | None:
        """The system call it stopped at, if that changes the folder."""
        info = (ctypes.c_uint64 * 16)()
        _ptrace(_GET_SYSCALL_INFO, self.pid, ctypes.sizeof(info), ctypes.addressof(info))
        number, *args = info[3:10]  # after op, arch, the places of instruction and stack
        if number in _BY_HANDLE:
            handle = args[2] if _BY_HANDLE[number] == "copy_file_range" else args[0]
            path = bytes(Path(f"/proc/{self.pid}/fd/{handle & 0xFFFFFFFF}").readlink())
            return self._told(_BY_HANDLE[number], path)
        name = (_BY_PATH | _BY_PATH_AT)[number]
        where, flags = (args[0], args[1]) if number in _BY_PATH else (args[1], args[2])
        if name.startswith("open") and not (flags & (os.O_CREAT | os.O_TRUNC) or self._at_reads):
            return None
        with open(f"/proc/{self.pid}/mem", "rb") as memory:  # noqa: PTH123
            memory.seek(where)
            return self._told(name, memory.read1(4096).split(b"\0")[0])

    def _told(self, name: str, path: bytes) -> str | None:
        return f"{name} {path.decode()}" if path.startswith(self._folder) else None


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    done = _libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(address), ctypes.c_void_p(data))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ask_to_be_traced() -> None:
    """In the child: stop at the calls above, and only there, so that the rest runs at full speed."""
    calls = [*_BY_HANDLE, *_BY_PATH, *_BY_PATH_AT]
    steps = [(0x20, 0, 0, 0)]  # load the number of the call
    steps += [(0x15, len(calls) - place, 0, call) for place, call in enumerate(calls)]  # if it is that one, jump
    steps += [(0x06, 0, 0, _RET_ALLOW), (0x06, 0, 0, _RET_TRACE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _ptrace(_TRACEME, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    zero = ctypes.c_ulong(0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    if _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), ctypes.byref(program), zero, zero):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


def _trial_of_tracing() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _ask_to_be_traced()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        return False
    try:
        _ptrace(_SETOPTIONS, pid, 0, _TRACESECCOMP | _EXITKILL)
        _ptrace(_CONT, pid, 0, 0)
    except OSError:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == 0
