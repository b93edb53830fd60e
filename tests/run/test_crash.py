"""A command killed at any moment leaves the folder before or after its step, and the same command completes it."""

import shutil
import signal
from pathlib import Path

import pytest

from ._forked import STEPS, Ended, Folders, Step, besides_progress, content, copy, look, run, signalled_at
from ._traced import TracedChild, can_trace

_INTERRUPTED = 130
_QUICK = "unlearn-samples"  # the step that does most: it asks a client, and stores a filter and centroids
_TOUCHES = [(_QUICK, 3), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in STEPS)]  # each third, or each
_EACH = 4  # of the system calls that change the folder so many are one kill


@pytest.mark.parametrize(("name", "each"), _TOUCHES)
def test_a_command_killed_where_it_touches_the_folder_is_before_or_after_its_step(
    name: str, each: int, folders: Folders, tmp_path: Path
):
    # Random moments rarely hit the microseconds between two changes of the folder.
    # Python tells an audit hook before it opens, renames, removes, locks or connects to anything: the k-th such event
    # that finds the folder other than the one before it did is the k-th moment that could matter, and there the child
    # kills itself.
    _signal_at_each_touch(folders.step(name), tmp_path, signal.SIGKILL, -signal.SIGKILL, each)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", _QUICK, "retrain"])
def test_a_command_interrupted_where_it_touches_the_folder_is_before_or_after_its_step(
    name: str, folders: Folders, tmp_path: Path
):
    # Ctrl-C, unlike a kill, unwinds: what the code does on its way out must not spoil the folder either.
    for ended in _signal_at_each_touch(folders.step(name), tmp_path, signal.SIGINT, _INTERRUPTED):
        said = besides_progress(ended.err)
        assert len(said) == 1, ended.err
        assert "Interrupted" in said[0]


def _signal_at_each_touch(step: Step, home: Path, number: int, expected_code: int, each: int = 1) -> list[Ended]:
    """One run for each time (or each third …) that Python touches a changed folder, with a signal there; their ends."""
    rerun, all_ended = _RerunOnce(step), []
    while True:
        point = each * len(all_ended) + 1
        folder = copy(step.start, home / f"run-{point}")
        ended = run(*step.args, "--run", folder, prepare=signalled_at(folder, point, number))
        if ended.code == 0:
            break
        assert ended.code == expected_code, ended
        step.check_killed(folder, home / "seen")
        rerun.check(folder)
        shutil.rmtree(folder, ignore_errors=True)
        all_ended.append(ended)
    assert len(all_ended) > 3  # it was hit somewhere, or this test tests nothing
    step.check_rerun(folder)
    return all_ended


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_command_killed_before_a_change_of_the_folder_is_before_or_after_its_step(
    name: str, folders: Folders, tmp_path: Path
):
    # SQLite and safetensors write without telling Python. The child is stopped before each system call that would
    # change the folder, and what lies there is copied: that is what a kill at this moment leaves, for all such moments.
    if not can_trace():
        pytest.skip("this system does not let a process stop another one at its system calls (ptrace, seccomp)")
    step, folder, stops = folders.step(name), tmp_path / "run", 0
    rerun = _RerunOnce(step)
    copy(step.start, folder)
    with TracedChild(*step.args, "--run", folder, folder=folder) as child:
        for stops, call in enumerate(child.stops(), start=1):
            if (stops + len(name)) % _EACH:  # other ones in each step
                continue
            left = copy(folder, tmp_path / f"run-{stops}")
            try:
                step.check_killed(left, tmp_path / "seen")
                rerun.check(left)
            except BaseException as error:
                error.add_note(f"killed before stop {stops}: {call}")
                raise
            shutil.rmtree(left, ignore_errors=True)
        assert child.wait().code == 0
    assert stops > 20  # it changed something, or this test tests nothing
    assert look(folder) == step.after


class _RerunOnce:
    """Completes a step from what a kill left; a folder of the same content was completed before, to the same end."""

    def __init__(self, step: Step) -> None:
        self._step, self._done = step, set[str]()

    def check(self, folder: Path) -> None:
        left = content(folder)
        if left not in self._done:
            self._step.check_rerun(folder)
            self._done.add(left)
