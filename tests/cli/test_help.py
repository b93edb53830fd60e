"""Help, JSON and completion: what every verb owes a person, a program and a shell."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from PIL import Image
from tests.cli._in_process import FAST, TRAIN, copy_of, fedup, ok

from fedup.cli._app import _VERBS
from fedup.filters.bottleneck import FilterConfig
from fedup.privacy.guarantee import DP
from fedup.statistics.centroids import CentroidConfig
from fedup.tasks.recipe import Recipe

VERBS = ("data", *(verb for verbs in _VERBS.values() for verb in verbs))


@pytest.fixture
def run(tmp_path):
    return copy_of("answered", tmp_path)


def process(*arguments, stdin=None, **environment):
    """`fedup …` in a process of its own, by the command that is installed where there is one."""
    installed = Path(sys.executable).with_name("fedup")
    command = [installed] if installed.exists() else [sys.executable, "-m", "fedup"]
    outside = {name: value for name, value in os.environ.items() if name not in ("FEDUP_RUN", "GITHUB_ACTIONS")}
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        input=stdin,
        env={**outside, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_and_offers_json(verb):
    ran = ok(verb, "--help")
    text = " ".join(ran.out.replace("│", " ").split())
    assert "Example" in text
    assert f"fedup {verb}" in text
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "[bold]" not in ran.out
    assert "--json" in ran.out
    assert verb != "train" or ok(verb, "-h").out == ran.out


def test_the_first_page_names_every_verb():
    page = ok("--help").out
    assert all(f" {verb} " in page for verb in (*VERBS, "bench"))
    assert fedup().code == 2
    assert ok("--version").out.startswith("fedup ")


def test_json_is_all_that_standard_output_holds(run, tmp_path):
    new, picture = tmp_path / "new", tmp_path / "digit.png"
    Image.new("L", (8, 8)).save(picture)
    for arguments in (
        ("train", "--run", new, *TRAIN[:4], "--rounds", 1),
        ("collect", "--run", new),
        ("collect", "--run", new),
        ("unlearn", "--run", new, "--class", 7, "--dry-run"),
        ("unlearn", "--run", new, "--class", 7, "--force", *FAST),
        ("unlearn", "--run", new, "--class", 7),
        ("status", "--run", new),
        ("evidence", "R1", "--run", new),
        ("evaluate", "--run", new, "--retrain"),
        ("predict", picture, "--run", new),
        ("verify", "--run", new),
        ("purge", "--yes", "--run", new),
        ("restore", "R1", "--run", new),
        ("data", "--run", new),
        ("data", "--run", new, "--client", 1),
        ("list", tmp_path),
    ):
        json.loads(ok(*arguments, "--json").out)


@pytest.mark.parametrize(
    ("verb", "settings"), [("train", Recipe), ("collect", CentroidConfig), ("collect", DP), ("unlearn", FilterConfig)]
)
def test_every_setting_with_a_help_is_an_option(verb, settings):
    page = " ".join(ok(verb, "--help").out.replace("│", " ").split())
    told = {field.name: field.metadata["help"] for field in fields(settings) if "help" in field.metadata}
    assert told
    assert [name for name, text in told.items() if f"--{name.replace('_', '-')} " not in page or text not in page] == []


def test_the_command_line_starts_without_torch():
    code = "import sys, fedup.cli._app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# Real processes


def test_a_process_puts_json_alone_on_standard_output_and_progress_elsewhere(tmp_path):
    ran = process("train", "--run", tmp_path / "run", *TRAIN[:4], "--rounds", 1, "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["already"] is False
    assert b"Training" in ran.stderr


def complete(shell: str, words: str, **environment) -> str:
    """What the installed command answers a shell at Tab."""
    arguments = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    installed = Path(sys.executable).with_name("fedup")
    if not installed.exists():
        pytest.skip("the command fedup is not installed beside this Python")
    ran = process(_FEDUP_COMPLETE=f"complete_{shell}", **arguments, **environment)
    assert ran.returncode == 0
    assert ran.stderr == b""
    return ran.stdout.decode()


def test_tab_completes_verbs_options_names_and_requests(run):
    for shell in ("bash", "zsh", "fish"):
        verbs = complete(shell, "fedup un")
        assert "unlearn" in verbs
        assert "status" not in verbs
    options = complete("bash", "fedup unlearn --cl")
    assert "--client" in options and "--class" in options and "--rank" not in options
    assert "digits" in complete("bash", "fedup train --data ")
    assert "lenet5" in complete("zsh", "fedup train --model le")
    assert ok("status", "--json", FEDUP_RUN=str(run)).json["in_force"] == ["R1", "R2", "R3"]
    requests = complete("bash", "fedup restore ", FEDUP_RUN=str(run))
    assert all(name in requests for name in ("R1", "R2", "R3"))
    assert "R2" in complete("fish", "fedup evidence R", FEDUP_RUN=str(run))


def test_tab_is_silent_where_there_is_no_run_folder(tmp_path):
    assert complete("bash", "fedup restore ", FEDUP_RUN=str(tmp_path / "nowhere")).strip() == ""
    (tmp_path / "run.sqlite").write_bytes(b"damaged" * 1000)
    assert complete("bash", "fedup restore ", FEDUP_RUN=str(tmp_path)).strip() == ""
