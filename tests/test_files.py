"""Files written whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import FedUPError, StorageError
from fedup.files import explained, replacing, write_text


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_a_file_holds_what_was_written_last(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("files") / "Zoë ρ.bin"
    for content in contents:
        with replacing(path) as partial:
            partial.write_bytes(content)
        assert content_of(path.parent) == {path.name: content}


def test_missing_folders_are_made(tmp_path):
    write_text(str(tmp_path / "a" / "b" / "page.html"), "ρ × …\n")
    assert (tmp_path / "a" / "b" / "page.html").read_bytes() == "ρ × …\n".encode()


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("written", [None, b"half of it"], ids=repr)
@pytest.mark.parametrize("old", [{}, {"file": b"old"}], ids=repr)
def test_a_failure_inside_leaves_the_old_content_and_no_partial_file(tmp_path, error, written, old):
    path = tmp_path / "file"
    for content in old.values():
        path.write_bytes(content)
    with pytest.raises(type(error)) as caught, replacing(path) as partial:
        if written is not None:
            partial.write_bytes(written)
        assert partial.parent == path.parent  # a rename within one disk
        assert path.exists() == bool(old)
        raise error
    assert caught.value is error
    assert content_of(tmp_path) == old


def test_content_is_on_disk_before_it_has_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """What a power cut leaves depends on this order."""
    path, steps, sync = tmp_path / "file", [], os.fsync
    path.write_bytes(b"old")

    def noted(handle):
        what = Path(f"/proc/self/fd/{handle}").readlink()
        steps.append(("folder" if what == tmp_path else "file", path.read_bytes()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(path) as partial:
        partial.write_bytes(b"new")
    assert steps == [("file", b"old"), ("folder", b"new")]


def test_a_failure_of_the_disk_says_what_was_being_done_and_what_to_do(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for number, advice in {
        errno.ENOSPC: "Free some space",
        errno.EDQUOT: "Free some of your quota",
        errno.EROFS: "read-only disk",
        errno.EACCES: "Ask for write permission",
        errno.EIO: "Check the path and the disk",
    }.items():
        message = rf"Could not write .*file: {os.strerror(number)}\. .*{advice}"
        with pytest.raises(StorageError, match=message) as caught, replacing(path):
            raise OSError(number, os.strerror(number))
        assert isinstance(caught.value, OSError) and isinstance(caught.value, FedUPError)
        assert content_of(tmp_path) == {"file": b"old"}


def test_a_disk_that_takes_no_more_leaves_the_old_content(tmp_path):
    """A real limit on the size of files, in a process of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    script = (
        "import resource, signal, sys; from fedup.errors import StorageError; from fedup.files import replacing\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with replacing(sys.argv[1]) as partial: partial.write_bytes(bytes(5000))\n"
        "except StorageError as error: print(error)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True
    ).stdout
    assert "Could not write" in printed
    assert "limits the size of files" in printed
    assert content_of(tmp_path) == {"file": b"old"}


def test_a_killed_process_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    script = (
        "import os, signal, sys; from fedup.files import replacing\n"
        "with replacing(sys.argv[1]) as partial:\n"
        "    partial.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    (rest,) = (name for name in content_of(tmp_path) if name != "file")
    assert rest.startswith(".file.")
    assert rest.endswith(".partial")


def test_a_folder_or_file_in_the_way_stays(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "file").write_text("a file")
    for path in (tmp_path / "folder", tmp_path / "file" / "page.html"):
        with pytest.raises(StorageError, match="Could not write"):
            write_text(path, "new")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"folder", "folder/inside", "file"}
    assert (tmp_path / "file").read_text() == "a file"


def test_a_failure_is_explained_once_and_only_where_it_is_the_disks():
    with pytest.raises(StorageError) as caught, explained("do the whole"), explained("do a part"):
        raise OSError(errno.ENOSPC, "full")
    assert str(caught.value).startswith("Could not do a part: full.")
    with pytest.raises(KeyError), explained("look something up"):
        raise KeyError
