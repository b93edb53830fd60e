"""Data sets and models that users bring as Python files: kept in the folder, as they were at training."""

import shutil
from pathlib import Path

import pytest
from tests.cli._in_process import QUICK, contents, fedup, ok

TRAIN = ("train", "--run", "run", "--data", "own_data.py", "--model", "own_model.py", "--clients", 3, "--rounds", 2)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def own(tmp_path):
    """Copies of the examples and a folder trained with them."""
    for name in ("own_data.py", "own_model.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    ok(*TRAIN, cwd=tmp_path)
    ok("collect", "--run", "run", cwd=tmp_path)
    return tmp_path


def test_a_folder_works_from_anywhere_and_without_the_originals(own, tmp_path_factory):
    for name in ("own_data.py", "own_model.py"):
        (own / name).unlink()
    moved = tmp_path_factory.mktemp("elsewhere") / "run"
    shutil.move(own / "run", moved)
    ok("unlearn", "--class", "2", *QUICK, "--run", moved)
    assert ok("evaluate", "--run", moved, "--json").json["forgotten"]["heldout"]["forget"] == 0
    ok("verify", "--run", moved)
    ok("restore", "--all", "--run", moved)


def test_training_again_from_the_same_files_changes_nothing(own):
    before = contents(own / "run")
    assert "before" in ok(*TRAIN, cwd=own).out
    assert contents(own / "run") == before
    (own / "own_model.py").write_text((own / "own_model.py").read_text() + "\n# changed\n")
    ran = fedup(*TRAIN, cwd=own)
    assert ran.code == 1
    assert "other settings: code" in ran.told
    assert contents(own / "run") == before


def test_a_kept_file_that_was_edited_is_found_and_not_run(own):
    (kept,) = (own / "run" / "code").glob("own_model-*.py")
    kept.write_text("raise SystemExit('run!')")
    verified = fedup("verify", "--run", own / "run", "--json")
    assert verified.code == 1
    for verb in (("unlearn", "--class", "2"), ("evaluate",), ("predict", "x.png"), ("export", "x.pt2")):
        ran = fedup(*verb, "--run", own / "run")
        assert ran.code == 1, verb
        assert "not the file that was kept" in ran.told
        assert "run!" not in ran.out + ran.err
