"""Data sets and models that users bring as Python files: kept in the folder, as they were at training."""

import shutil
from pathlib import Path

import pytest
from tests.cli._in_process import FAST, contents, fedup, ok

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def own(tmp_path):
    """Copies of the examples and a folder trained with them."""
    for name in ("own_data.py", "own_model.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    ok("train", "--run", "run", "--data", "own_data.py", "--model", "own_model.py", "--clients", "3", cwd=tmp_path)
    ok("collect", "--run", "run", cwd=tmp_path)
    return tmp_path


def test_a_folder_works_from_anywhere_and_without_the_originals(own, tmp_path_factory):
    for name in ("own_data.py", "own_model.py"):
        (own / name).unlink()
    moved = tmp_path_factory.mktemp("elsewhere") / "run"
    shutil.move(own / "run", moved)
    ok("unlearn", "--class", "2", *FAST, "--force", "--run", moved)
    assert ok("evaluate", "--run", moved, "--json").json["forgotten"]["heldout"]["forget"] == 0
    ok("verify", "--run", moved)
    ok("restore", "--all", "--run", moved)


def test_what_becomes_of_the_originals_does_not_matter(own):
    before = ok("evaluate", "--run", "run", "--json", cwd=own).out
    (own / "own_model.py").write_text("raise RuntimeError")
    assert ok("evaluate", "--run", "run", "--json", cwd=own).out == before


def test_training_again_from_the_same_files_changes_nothing(own):
    before = contents(own / "run")
    train = ("train", "--run", "run", "--data", "own_data.py", "--model", "own_model.py", "--clients", "3")
    assert "before" in ok(*train, cwd=own).out
    assert contents(own / "run") == before
    (own / "own_model.py").write_text((own / "own_model.py").read_text() + "\n# changed\n")
    ran = fedup(*train, cwd=own)
    assert ran.code == 1
    assert "other settings: code" in ran.told
    assert contents(own / "run") == before


def test_nobody_else_may_look_into_the_folder(own):
    assert (own / "run").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("which", ["data", "model"])
def test_a_kept_file_that_was_edited_is_found_and_not_run(own, which):
    (kept,) = (own / "run" / "code").glob(f"own_{which}-*.py")
    kept.write_text("raise SystemExit('run!')")
    verified = fedup("verify", "--run", own / "run", "--json")
    assert verified.code == 1
    for verb in (("unlearn", "--class", "2"), ("evaluate",), ("predict", "x.png"), ("export", "x.pt2")):
        ran = fedup(*verb, "--run", own / "run")
        assert ran.code == 1, verb
        assert "not the file that was kept" in ran.told
        assert "run!" not in ran.out + ran.err


def test_no_rounds_without_weights_is_wrong_usage(tmp_path):
    assert fedup("train", "--run", tmp_path / "run", "--rounds", "0").code == 2
