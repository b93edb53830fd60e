"""A run folder wherever it lies: moved, oddly named, read-only, on a machine whose clock jumps."""

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from PIL import Image
from tests.cli._in_process import FAST, TRAIN, contents, copy_of, fedup, filter_file, ok, sample_ids, sha256

from fedup.run import journal
from fedup.run.folder import Run


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "digit.png"
    Image.new("L", (8, 8), 90).save(path)
    return path


def test_a_folder_can_be_moved_between_any_two_commands(tmp_path, picture):
    run = copy_of("answered", tmp_path / "first")
    stayed = copy_of("answered", tmp_path / "stayed")
    before = contents(run)
    moved = run.rename(tmp_path / "second")
    assert ok("verify", "--run", moved, "--json").json["ok"] is True
    assert contents(moved) == before
    answer = ok("predict", picture, "--run", moved, "--json").out
    assert answer == ok("predict", picture, "--run", stayed, "--json").out
    ok("unlearn", "--run", moved, "--class", 3, "--force")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    moved = moved.rename(tmp_path / "deep" / "er" / "third")
    ok("restore", "R1", "--run", moved, "--force")
    ok("unlearn", "--run", stayed, "--class", 3, "--force")
    ok("restore", "R1", "--run", stayed, "--force")
    assert sha256(filter_file(moved)) == sha256(filter_file(stayed))
    text = "".join(event.kind + json.dumps(event.body) for event in Run(moved).read().events)
    assert str(tmp_path) not in text  # nothing in the journal knows where the folder lies


ODD = (
    "with spaces  and\ttab",
    "Überfall-測試-😀",
    "[data] [",
    "[bold]loud[/bold] [/]",
    "-rf",
    "--json",
    "a'b\"c$HOME`x`;#&",
    "100%?mode=memory#x",
    "trailing.",
    "new\nline",
)


@pytest.mark.parametrize("name", ODD)
def test_a_folder_of_any_name_works_with_every_verb(name, tmp_path, picture):
    copy_of("answered", tmp_path / name)
    here = {"cwd": tmp_path}
    before = contents(tmp_path / name)
    assert ok("status", f"--run={name}", "--json", **here).json["run"] == name
    assert name.split("\n")[0].split("\t")[0] in ok("status", f"--run={name}", **here).out
    assert ok("verify", f"--run={name}", "--json", **here).json["ok"] is True
    ok("predict", picture, f"--run={name}", **here)
    ok("evaluate", f"--run={name}", **here)
    ok("data", f"--run={name}", "--client", 1, **here)
    ok("unlearn", f"--run={name}", "--class", 3, "--dry-run", **here)
    assert contents(tmp_path / name) == before
    ok("unlearn", f"--run={name}", "--class", 3, "--force", **here)
    ok("evidence", "R2", f"--run={name}", **here)
    ok("purge", f"--run={name}", "--yes", **here)
    ok("restore", "R1", f"--run={name}", "--force", **here)
    ok("restore", "--all", f"--run={name}", **here)
    assert ok("verify", f"--run={name}", "--json", **here).json["ok"] is True
    assert {path.name for path in tmp_path.iterdir()} == {name.split("/")[0], picture.name}
    if "/" not in name:
        assert name in ok("list", "--json", **here).json["runs"]


@pytest.mark.parametrize("name", ["[data] [", "-rf", "with spaces"])
def test_training_collecting_and_exporting_under_an_odd_name(name, tmp_path):
    here = {"cwd": tmp_path}
    out = ok("train", f"--run={name}", *TRAIN[:4], "--rounds", 1, **here).out
    assert name in out
    ok("collect", f"--run={name}", **here)
    ok("export", f"--run={name}", "--", f"{name}.pt2", **here)
    assert (tmp_path / f"{name}.pt2").exists()


@pytest.mark.parametrize("name", ["[data] [", "[/bold]", "[red]x[/red]"])
def test_errors_name_odd_paths_as_they_are(name, tmp_path):
    ran = fedup("status", "--run", name, cwd=tmp_path)
    assert ran.code == 1
    assert f"no run folder at {name}." in ran.err
    ran = fedup("verify", "--run", name, cwd=tmp_path)
    assert ran.code == 1
    assert f"no run folder at {name}." in ran.err
    ran = fedup("predict", f"{name}.png", "--run", copy_of("trained", tmp_path / "run"), cwd=tmp_path)
    assert ran.code == 1
    assert f"{name}.png" in ran.err


def test_requests_files_and_references_may_be_named_anything(tmp_path):
    run = copy_of("collected", tmp_path)
    path = tmp_path / "[a] [/b].csv"  # the slash makes it a file in a folder, and rich could take it for markup
    path.parent.mkdir()
    path.write_text("reference,client,class,sample\n[/x] Ü,,7,\n", encoding="utf-8")
    assert "[/x] Ü" in ok("unlearn", "--csv", path, "--run", run, "--force", *FAST).out
    assert "[/x] Ü" in ok("status", "--run", run).out
    ok("evidence", "[/X] ü", "--run", run)
    assert ok("restore", "[/x] Ü", "--run", run, "--json").json["requests"] == ["R1"]
    path.write_text("client,class,sample\nx,,\n")
    ran = fedup("unlearn", "--csv", path, "--run", run)
    assert ran.code == 1
    assert str(path) in ran.err


def test_a_symlink_to_a_folder_is_the_folder(tmp_path):
    run = copy_of("answered", tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    ok("restore", "R1", "--run", tmp_path / "link", "--force")
    assert ok("status", "--run", run, "--json").json["in_force"] == ["R2", "R3"]
    assert ok("verify", "--run", tmp_path / "link", "--json").json["ok"] is True


def test_a_clock_that_jumps_back_a_year_is_noted_and_harms_nothing(tmp_path, monkeypatch):
    run, steady = copy_of("answered", tmp_path / "run"), copy_of("answered", tmp_path / "steady")

    class LastYear(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=365)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "datetime", LastYear)
        ok("unlearn", "--run", run, "--class", 3, "--reference", "T-1", "--force")
        ok("restore", "R2", "--run", run, "--force")
    ok("unlearn", "--run", steady, "--class", 3, "--reference", "T-1", "--force")
    ok("restore", "R2", "--run", steady, "--force")
    assert sha256(filter_file(run)) == sha256(filter_file(steady))
    events = Run(run).read().events
    assert events[-1].at < events[0].at
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


def test_a_folder_closed_by_permissions_can_be_read_and_is_explained(tmp_path, picture):
    run = copy_of("answered", tmp_path)
    for path in (run, *run.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        if os.access(run / "run.sqlite", os.W_OK):
            pytest.skip("permissions do not stop this user (root?)")
        assert ok("status", "--run", run, "--json").json["in_force"] == ["R1", "R2", "R3"]
        assert ok("verify", "--run", run, "--json").json["ok"] is True
        ok("predict", picture, "--run", run)
        for arguments in (("unlearn", "--class", 3), ("restore", "R1"), ("evidence", "R1")):
            ran = fedup(*arguments, "--run", run)
            assert (ran.code, ran.out) == (1, "")
            assert "permission" in ran.err
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(0o700)
