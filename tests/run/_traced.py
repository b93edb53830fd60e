"""Commands that are stopped before each system call that would change a folder: by ptrace, with a seccomp filter."""

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from ._forked import Child

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
