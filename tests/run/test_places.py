"""A run folder wherever it lies: moved, oddly named, read-only, on a machine whose clock jumps."""

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from PIL import Image
from tests.cli._in_process import QUICK, TRAIN, contents, copy_of, fedup, filter_file, ok, sample_ids, sha256

from fedup.run import journal
from fedup.run.folder import Run


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "digit.png"
    Image.new("L", (8, 8), 90).save(path)
    return path


ODD = ("-rf", "[bold] [ Überfall-測試-😀 100%?mode=memory#x", "a'b\"c$HOME`x`;#& with  spaces\tand\nnew line")


@pytest.mark.parametrize("name", ODD)
def test_a_folder_of_any_name_works_with_every_verb_and_can_be_moved_between_any_two(name, tmp_path, picture):
    folder, stayed = copy_of("answered", tmp_path / "first"), copy_of("answered", tmp_path / "elsewhere" / "stayed")
    here = {"cwd": tmp_path}
    before = contents(folder)
    folder = folder.rename(tmp_path / name)
    assert ok("status", f"--run={name}", "--json", **here).json["run"] == name
    assert name.split("\t")[0] in ok("status", f"--run={name}", **here).out
    assert ok("verify", f"--run={name}", "--json", **here).json["ok"] is True
    answer = ok("predict", picture, f"--run={name}", "--json", **here).out
    assert answer == ok("predict", picture, "--run", stayed, "--json").out
    ok("evaluate", f"--run={name}", **here)
    ok("unlearn", f"--run={name}", "--class", 3, "--dry-run", **here)
    assert contents(folder) == before
    assert name in ok("list", "--json", **here).json["runs"]
    (tmp_path / "link").symlink_to(folder)
    for run in (tmp_path / "link", stayed):
        ok("unlearn", f"--run={run}", "--class", 3, "--reference", "[/x] Ü", *QUICK)
    assert "[/x] Ü" in ok("status", f"--run={name}", **here).out
    ok("evidence", "[/X] ü", f"--run={name}", **here)
    moved = folder.rename(tmp_path / "elsewhere" / "third")
    for run in (moved, stayed):
        ok("restore", "R1", "--run", run, "--force", "--max-class-loss", 100)
    assert sha256(filter_file(moved)) == sha256(filter_file(stayed))
    text = "".join(event.kind + json.dumps(event.body) for event in Run(moved).read().events)
    assert str(tmp_path) not in text  # nothing in the journal knows where the folder lies
    ok("export", f"--run={moved}", "--", f"{name}.pt2", **here)
    assert (tmp_path / f"{name}.pt2").exists()


def test_errors_name_odd_paths_as_they_are(tmp_path):
    name = "[/bold] [data] ["
    for verb in (("status",), ("unlearn", "--class", 3)):
        ran = fedup(*verb, "--run", name, cwd=tmp_path)
        assert ran.code == 1
        assert f"no run folder at {name}." in ran.err
    ran = fedup("unlearn", "--csv", f"{name}.csv", "--run", copy_of("collected", tmp_path), cwd=tmp_path)
    assert ran.code == 1
    assert f"{name}.csv" in ran.err


def test_a_clock_that_jumps_back_a_year_is_noted_and_harms_nothing(tmp_path, monkeypatch):
    run, steady = copy_of("answered", tmp_path / "run"), copy_of("answered", tmp_path / "steady")

    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=365)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "datetime", LastYear)
        ok("unlearn", "--run", run, "--class", 3, "--reference", "T-1", *QUICK)
        ok("restore", "R2", "--run", run, "--force", "--max-class-loss", 100)
    ok("unlearn", "--run", steady, "--class", 3, "--reference", "T-1", *QUICK)
    ok("restore", "R2", "--run", steady, "--force", "--max-class-loss", 100)
    assert sha256(filter_file(run)) == sha256(filter_file(steady))
    events = Run(run).read().events
    assert events[-1].at < events[0].at
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert datetime.fromisoformat(events[-1].at) < datetime.now(UTC) - timedelta(days=364)
    checks = {check["name"]: check for check in ok("verify", "--run", run, "--json").json["checks"]}
    assert checks["clock"]["ok"] is None
    assert "clock" in ok("verify", "--run", run).out
    status = ok("status", "--run", run, "--json").json
    assert status["in_force"] == ["R1", "R3", "R4"]
    listed = fedup("evidence", "T-1", "--run", run).told  # by the order of events, whatever the clock said
    assert "R1: forget classes [7], in force; R4: forget classes [3], in force" in listed
    ok("status", "--run", run)
    ok("restore", "--all", "--run", run)


@pytest.fixture
def read_only(tmp_path):
    """A run folder on a read-only mount: permissions alone would not stop root."""
    copy_of("answered", tmp_path / "writable")
    place = tmp_path / "read-only"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a read-only mount needs root and mount(8)")
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", tmp_path / "writable", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (place / "x").touch()
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_read_only_folder_can_be_read_and_says_that_it_cannot_be_written(read_only, tmp_path, picture):
    before = contents(read_only)
    assert ok("status", "--run", read_only, "--json").json["in_force"] == ["R1", "R2", "R3"]
    assert ok("verify", "--run", read_only, "--json").json["ok"] is True
    assert json.loads(ok("predict", picture, "--run", read_only, "--json").out)["filter"]
    ok("evaluate", "--run", read_only)
    ok("data", "--run", read_only)
    ok("export", tmp_path / "model.pt2", "--run", read_only)
    ok("unlearn", "--class", 3, "--dry-run", "--run", read_only)
    ok("unlearn", "--samples", f"3:{sample_ids(3)[0]}", "--dry-run", "--run", read_only)
    ok("evidence", "R1", "--run", read_only, "--out", tmp_path / "pages")
    assert (tmp_path / "pages" / "R1.html").exists()
    for arguments in (
        ("unlearn", "--class", 3),
        ("restore", "R1"),
        ("restore", "--all"),
        ("purge", "--yes"),
        ("evidence", "R1"),
        ("collect",),
        ("train", *TRAIN),
        ("evaluate", "--retrain"),
    ):
        ran = fedup(*arguments, "--run", read_only)
        assert (ran.code, ran.out) == (1, ""), arguments
        assert "ead-only" in ran.err, ran.err
        assert "copy" in ran.err, ran.err
    assert contents(read_only) == before
