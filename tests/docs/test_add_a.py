"""The pages docs/add_a_*.md, followed to the letter: each part is saved where its page says, and works at once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("add_a_*.md"))
SAVED = re.compile(r"Save this as\s+`src/(fedup/(?:bench|tasks)/\w+/(\w+)\.py)`:\s+```python\n(.*?)```", re.DOTALL)
EXPERIMENT = """
[[federations]]
data = "stripes"
model = "mlp"
clients = 4
leave_out = ["two_classes"]
[[federations]]
data = "digits"
model = "mlp"
clients = 4
rounds = 2
[scenarios.class]
[scenarios.two_classes]
[methods.none]
[methods.shrink]
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """A copy of the package with one new part of each kind; how to run Python on it."""
    folder = tmp_path_factory.mktemp("added")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    names = []
    for page in PAGES:
        place, name, code = SAVED.search(page.read_text(encoding="utf-8")).groups()
        (folder / "src" / place).write_text(code, encoding="utf-8")
        names.append(name)
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "FEDUP_CACHE": str(folder / "cache")}

    def python(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)

    return folder, names, python


def test_there_is_a_page_for_each_kind():
    assert [page.stem for page in PAGES] == [
        f"add_a_{kind}" for kind in ("dataset", "method", "metric", "model", "scenario")
    ]


@pytest.mark.slow
def test_what_is_added_meets_the_contracts(added):
    _, names, python = added
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts", "-k", " or ".join(names))
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 25


@pytest.mark.slow
def test_what_is_added_takes_part_in_an_experiment_and_its_report(added):
    folder, _, python = added
    (folder / "mine.toml").write_text(EXPERIMENT)
    places = ["--results", folder / "results"]
    done = python("-m", "fedup", "bench", "run", folder / "mine.toml", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    done = python("-m", "fedup", "bench", "report", folder / "mine.toml", *places, "--folder", folder / "report")
    assert done.returncode == 0, done.stderr
    text = (folder / "report" / "tables" / "mine.md").read_text(encoding="utf-8")
    assert {"## stripes-mlp, class", "## digits-mlp, two_classes"} <= set(text.splitlines())
    assert "## stripes-mlp, two_classes" not in text
    assert "| shrink |" in text
    assert "| confidence |" in text.replace("| confidence\n", "| confidence |")


def test_what_pages_print_is_clean(tmp_path):
    for page in PAGES:
        (tmp_path / f"{page.stem}.py").write_text(SAVED.search(page.read_text(encoding="utf-8"))[3], encoding="utf-8")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", tmp_path]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
