"""The lock: one holder, who can be named, and none after its process is gone."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from fedup.errors import BusyError, SettingError
from fedup.run.lock import held, holder

HOLD = (
    "import sys; from pathlib import Path; from fedup.run.lock import held\n"
    "with held(Path(sys.argv[1]), 'collect'):\n"
    "    print('held', flush=True); sys.stdin.readline()\n"
)


@contextmanager
def another_holder(path):
    """Another process that holds the lock until it is sent a line or a signal."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ein Ordner" / "lock"


@pytest.fixture(autouse=True)
def folder(path):
    path.parent.mkdir()


def test_a_second_holder_is_told_who_holds_the_lock(path):
    with another_holder(path) as process:
        told = rf"`fedup collect` \(process {process.pid} on .*ein Ordner"
        with pytest.raises(BusyError, match=told), held(path, "unlearn"):
            pytest.fail("two processes hold the lock")
        assert f"`fedup collect` (process {process.pid} on " in holder(path)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait() == 0
    with held(path, "unlearn"):
        pass


def test_a_holder_in_the_same_process_is_a_holder(path):
    assert holder(path) is None
    assert holder(path.parent / "nowhere" / "lock") is None
    with held(path, "train"):
        with pytest.raises(BusyError, match=f"process {os.getpid()} on"), held(path, "collect"):
            pytest.fail("the lock is held twice")
        assert "`fedup train`" in holder(path)  # the one that was refused left no trace
    assert holder(path) is None
    assert path.read_bytes() == b""
    with pytest.raises(KeyError), held(path, "train"):  # an error inside frees it
        raise KeyError
    assert holder(path) is None
    with pytest.raises(SettingError, match="0 or more"), held(path, "train", wait_s=float("nan")):
        pytest.fail("nobody waits for that long")


def test_one_who_waits_is_told_once_and_then_gets_the_lock(path):
    told = []
    with another_holder(path) as process:

        def on_wait(who):
            told.append(who)
            process.stdin.write("\n")
            threading.Timer(0.25, process.stdin.flush).start()  # a few looks later it is free

        with held(path, "unlearn", wait_s=60, on_wait=on_wait):
            assert f"process {os.getpid()} on" in holder(path)
    assert len(told) == 1
    assert "`fedup collect`" in told[0]


def test_one_who_waited_long_enough_gives_up_and_says_for_whom(path):
    told, refusal = [], r"`fedup collect`.*Nothing was changed.*--wait"
    with (
        another_holder(path),
        pytest.raises(BusyError, match=refusal),
        held(path, "unlearn", wait_s=0.15, on_wait=told.append),
    ):
        pytest.fail("two processes hold the lock")
    assert len(told) == 1


def test_a_killed_holder_leaves_no_lock(path):
    with another_holder(path) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert path.read_text()  # what it had noted is still there, and counts for nothing
        assert holder(path) is None
        with held(path, "unlearn"):
            assert f"process {os.getpid()} on" in holder(path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"pid": 3}', b"\xff\xfe"], ids=repr)
def test_a_note_that_cannot_be_read_hides_no_holder(path, content):
    with held(path, "train"):
        path.write_bytes(content)
        assert holder(path) == "Another process"
        with pytest.raises(BusyError, match="Another process is writing"), held(path, "collect"):
            pytest.fail("the lock is held twice")
