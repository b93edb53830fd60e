"""A full disk ends a command with one clear error; the folder is as it was, and goes on once there is space again."""

import ctypes
import errno
import os
import re
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from fedup.cli._session import Session

from ._forked import Ended, Folders, Step, check_sound, copy, look, run
from ._traced import TracedChild, can_trace

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_USERS, _NEW_MOUNTS, _PRIVATE = 0x10000000, 0x00020000, 1 << 18 | 1 << 14  # of unshare and mount
_NO_MOUNT = "a small file system cannot be mounted here: "
_SIZE = 4 << 20  # holds any folder here twice
_PAGE = 4096  # what a file on a tmpfs takes at least
_FREE = (0, 2, 16)  # from no space at all, where a lock cannot be noted, over the journal's pages to the largest file
_QUICK = "unlearn-samples"
_STEPS = [
    _QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("train", "collect", "restore-one", "purge")),
]
_EACH = 5  # of the writes so many are one test of a disk that fills up there
_WRITES = ("open", "write", "pwrite", "mkdir", "fallocate", "copy", "sendfile", "link")


# SQLite that cannot make its file says the last; the advice must not send people to look for permissions alone.
_NO_SPACE = ("No space left on device", "disk is full", "unable to open database file")
_ADVICE = "free some space"
_TOO_LARGE = ("File too large", "disk I/O error")  # SQLite tells no more


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(params=_STEPS)
def step(request: pytest.FixtureRequest, folders: Folders) -> Step:
    return folders.step(request.param)


@pytest.mark.parametrize("free_pages", _FREE)
def test_on_a_full_disk_a_command_says_so_and_the_folder_is_as_before(step: Step, free_pages: int, tmp_path: Path):
    def fill_and_run() -> None:
        folder, filler = copy(step.start, tmp_path / "run"), tmp_path / "filler"
        answers = _answers(folder)
        _fill(filler, free_pages)
        ended = run(*step.args, "--run", folder)
        assert ended.code == 1 or free_pages, ended
        _check_refused(step, ended, folder, answers)
        filler.unlink()
        step.check_rerun(folder)

    _on_a_small_disk(tmp_path, fill_and_run)


def _on_a_small_disk(place: Path, work: Callable[[], None]) -> None:
    """Do the work in a child that sees a file system of a few megabytes at the place; it goes with the child."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = "" if _mount(place) else f"{_NO_MOUNT}{os.strerror(ctypes.get_errno())}"
            if not said:
                work()
        except BaseException:
            said = traceback.format_exc()
        os.write(tell, said.encode()[-50_000:])  # what a pipe holds
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if said.startswith(_NO_MOUNT):
        pytest.skip(said)
    assert status == 0
    assert not said, said


def _mount(place: Path) -> bool:
    """Mount a small file system that this process and its children see; who is not root becomes root of a namespace."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_MOUNTS) and _libc.unshare(_NEW_MOUNTS | _NEW_USERS) == 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    if _libc.mount(None, b"/", None, _PRIVATE, None):
        return False
    return _libc.mount(b"tmpfs", bytes(place), b"tmpfs", 0, f"size={_SIZE}".encode()) == 0


def _check_refused(
    step: Step, ended: Ended, folder: Path, answers: torch.Tensor | None, said: Sequence[str] = _NO_SPACE
) -> None:
    """Refused with one line that says why and what to do, the folder as it was; or, with enough space, done."""
    if ended.code == 0:
        assert look(folder) == step.after
        return
    assert ended.code == 1, ended
    progress = re.compile(r" …$|: round \d+ of \d+")
    errors = [line for line in ended.err.splitlines() if not progress.search(line)]
    assert len(errors) == 1, ended.err
    assert errors[0].startswith("Error: "), ended.err
    assert any(words in errors[0] for words in said), ended.err
    assert "what was there before is untouched" in errors[0].lower(), ended.err
    # Found here: what safetensors says of a full disk came without advice.
    assert said is _TOO_LARGE or _ADVICE in errors[0].lower(), ended.err
    assert "Traceback" not in ended.err + ended.out
    found = look(folder)
    assert found in (*step.before, step.after)
    if found is None:
        return
    check_sound(folder)  # even now, with no space left
    if found != step.after and answers is not None:
        assert torch.equal(_answers(folder), answers)


def _answers(folder: Path) -> torch.Tensor | None:
    """What the folder serves."""
    found = look(folder)
    if found is None or "trained" not in found.events:
        return None
    session = Session(folder)
    state, plugged = session.served()
    with torch.no_grad():
        return plugged(session.probe(state)) if plugged.served else plugged.unplug()(session.probe(state))


def _fill(filler: Path, free_pages: int) -> None:
    """Take up all space but so many pages."""
    left = os.statvfs(filler.parent)
    size = left.f_bavail * left.f_frsize - free_pages * _PAGE
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


@pytest.mark.parametrize("limit_bytes", [0, 50_000])
def test_a_limit_on_the_size_of_files_is_said_and_the_folder_is_as_before(step: Step, limit_bytes: int, tmp_path: Path):
    # The same without any privilege: writes beyond a size fail, in files of a folder on an ordinary disk.
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    folder = copy(step.start, tmp_path / "run")
    answers = _answers(folder)
    _check_refused(step, run(*step.args, "--run", folder, prepare=limit), folder, answers, _TOO_LARGE)
    step.check_rerun(folder)


@pytest.mark.slow
def test_whichever_write_is_the_first_without_space_the_folder_is_as_before(step: Step, tmp_path: Path):
    # From its k-th write on all writes of the command are answered with ENOSPC: a disk that fills up there.
    # Found here: where SQLite could not make a file, training left with a traceback and the others blamed permissions.
    if not can_trace():
        pytest.skip("this system does not let a process change the system calls of another one (ptrace, seccomp)")
    for first in range(1, 1000, _EACH):
        folder = copy(step.start, tmp_path / f"run-{first}")
        answers, last = _answers(folder), None
        with TracedChild(*step.args, "--run", folder, folder=folder) as child:
            writes = 0
            for call in child.stops():
                if call.startswith(_WRITES):
                    writes += 1
                    if writes >= first:
                        child.refuse(errno.ENOSPC)
                        last = last or call
            ended = child.wait()
        if last is None:
            break
        try:
            _check_refused(step, ended, folder, answers)
            step.check_rerun(folder)
        except BaseException as error:
            error.add_note(f"no space from write {first} on: {last}; said: {ended.err}")
            raise
        shutil.rmtree(folder)
    assert first > 10
