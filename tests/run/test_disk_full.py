"""A full disk ends a command with one clear error; the folder is as it was, and goes on once there is space again."""

import errno
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fedup.cli._session import Session

from ._forked import Ended, Folders, Step, besides_progress, check_sound, copy, look, run
from ._traced import TracedChild, can_trace

_QUICK = "unlearn-samples"
_SLOW = ("train", "collect", "restore-one", "purge", "more-rounds", "retrain")
_STEPS = [
    _QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW),
]
_EACH = 5  # of the writes so many are one test of a disk that fills up there
_WRITES = ("open", "write", "pwrite", "mkdir", "fallocate", "copy", "sendfile", "link")


# SQLite that cannot make its file says the last; the advice must not send people to look for permissions alone.
_NO_SPACE = ("No space left on device", "disk is full", "unable to open database file")
_ADVICE = "free some space"
_TOO_LARGE = ("File too large", "disk I/O error")  # SQLite tells no more


@pytest.fixture(params=_STEPS)
def step(request: pytest.FixtureRequest, folders: Folders) -> Step:
    return folders.step(request.param)


def _check_refused(
    step: Step, ended: Ended, folder: Path, answers: torch.Tensor | None, said: Sequence[str] = _NO_SPACE
) -> None:
    """Refused with one line that says why and what to do, the folder as it was; or, with enough space, done."""
    if ended.code == 0:
        assert look(folder) == step.after
        return
    assert ended.code == 1, ended
    errors = besides_progress(ended.err)
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
