"""Cells of the paper's tables: found in any experiment's results, run once, the first seed and small pairs first."""

import json
import shutil
from pathlib import Path

import pytest
from tests.cli._in_process import ok as fedup

from fedup.bench import alone, timing
from fedup.bench.experiment import load_experiment
from fedup.bench.reproduction.page import write_page
from fedup.bench.reproduction.pool import Pool
from fedup.bench.reproduction.queue import make_queue
from fedup.bench.reproduction.tables import load_tables
from fedup.bench.results import Results
from fedup.errors import SettingError

pytestmark = pytest.mark.usefixtures("cache")
FEDERATION = '[[federations]]\ndata = "digits"\nrounds = 1\nclients = 3\nrows = 900\nbatch_size = 32\n'
OTHER = FEDERATION + "[scenarios.clients]\nuse = 'client'\n[methods.retrain]\n[methods.mine]\nuse = 'none'\n"
TABLE = f"""
title = "A table"
seeds = [0, 1]
{{shadow}}
[paper]
order = {{order}}
number = "Table {{order}}"
label = "x"
shows = ["r_a"]
columns = {{{{ none = "before", retrain = "Retrain", fedup = "FedUP" }}}}
[[paper.claims]]
text = "FedUP keeps what it knows."
holds = ["fedup.r_a >= retrain.r_a - 1"]
[[paper.claims]]
text = "FedUP knows more than there is."
holds = ["fedup.r_a >= 1 + 0.5"]
{FEDERATION}
[scenarios.client]
[methods.none]
[methods.fedup]
steps = 5
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A table, and a second one with a shadow model that shares all its cells."""
    paper = tmp_path / "benchmarks" / "experiments" / "paper"
    paper.mkdir(parents=True)
    (paper / "first.toml").write_text(TABLE.format(order=1, shadow="").replace("1 + 0.5", "1.5"))
    second = (
        TABLE.format(order=2, shadow="shadow = true").replace("1 + 0.5", "1.5").replace("seeds = [0, 1]", "seeds = [0]")
    )
    (paper / "second.toml").write_text(second)
    return tmp_path / "benchmarks"


def queue_of(folder, **how):
    tables = load_tables(folder / "experiments" / "paper")
    return make_queue(tables, Pool(folder / "results"), folder=folder / "experiments" / "paper", **how)


def files_in(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def test_results_of_other_experiments_count_by_configuration_and_the_rest_runs_once_in_pieces(folder, tmp_path):
    (tmp_path / "other.toml").write_text(OTHER)
    (tmp_path / "benchmarks" / "results").mkdir()
    fedup("bench", "run", str(tmp_path / "other.toml"), "--results", str(folder / "results"), "--device", "cpu")
    before = files_in(folder / "results")
    assert len(before) == 2  # under other names of experiment, scenario and method
    queue = queue_of(folder)
    first, second = (queue.of(table) for table in dict.fromkeys(one.table for one in queue.wanted))
    assert (first, second) == ((2, 4, 0), (0, 3, 0))  # those without a shadow model serve the first table alone
    assert len(queue.cells) == 6  # with seed 0: fedup for both, and the two others again with the shadow model
    assert [cell.group.recipe.seed for cell in queue.cells] == [0, 0, 0, 1, 1, 1]
    assert queue.cells[0].method.name == "retrain" and all(cell.group.shadow for cell in queue.cells[:3])
    spent = fedup("bench", "paper", "--folder", str(folder), "--budget-minutes", "0", "--device", "cpu")
    assert "about" in spent.out and "6 cells to run" in spent.out and files_in(folder / "results") == before
    done = fedup("bench", "paper", "--folder", str(folder), "--seeds", "0", "--device", "cpu")
    assert "3 cells done, 0 failed, 0 left" in done.out
    assert "3 cells to run" in fedup("bench", "paper", "--folder", str(folder), "--dry-run").out
    assert "3 cells done" in fedup("bench", "paper", "--folder", str(folder), "--device", "cpu").out
    assert "Nothing to run" in fedup("bench", "paper", "--folder", str(folder)).out
    after = files_in(folder / "results")
    assert {path: after[path] for path in before} == before and len(after) == 8
    with_shadow = [path for path in after.keys() - before.keys() if "seed0" in path.name]
    assert all(json.loads(path.read_text())["metrics"]["mia_authors"] is not None for path in with_shadow)
    _look_at_the_page(folder)


def _look_at_the_page(folder):
    write_page(folder)
    page = (folder / "pages" / "reproduction.html").read_text()
    assert page.count(">reproduced<") == 2 and page.count(">not reproduced<") == 2 and "not run yet</td>" not in page
    assert "n = 2" in page and "fedup bench paper --force --only first --only digits-lenet5 --only client" in page
    shutil.rmtree(folder / "results" / "paper")
    write_page(folder)
    page = (folder / "pages" / "reproduction.html").read_text()
    assert "n = 1 of 2" in page and "not measured yet" in page and page.count('class="absent">not run yet') == 4


def test_clean_times_are_taken_of_tables_that_show_times_and_other_experiments_stay_as_they_are(
    folder, tmp_path, monkeypatch
):
    class Alone:
        def __init__(self, device):
            pass

        def finish(self, *, idle=False):
            return alone.Alone(True, {})

    monkeypatch.setattr(timing, "AloneCheck", Alone)
    monkeypatch.setattr(alone, "look_once", lambda device: Alone(device).finish())
    (folder / "experiments" / "paper" / "second.toml").unlink()
    table = folder / "experiments" / "paper" / "first.toml"
    table.write_text(table.read_text().replace('shows = ["r_a"]', 'shows = ["time"]\ntimed = true'))
    (tmp_path / "other.toml").write_text(OTHER)
    fedup("bench", "run", str(tmp_path / "other.toml"), "--results", str(folder / "results"), "--device", "cpu")
    before = files_in(folder / "results")
    write_page(folder)
    assert "2 clean times not taken yet" in (folder / "pages" / "reproduction.html").read_text()
    where = "bench", "paper", "--times", "--folder", str(folder), "--device", "cpu"
    assert "2 finished cells have no clean time" in fedup(*where).out
    assert "0 finished cells" in fedup(*where).out
    after = files_in(folder / "results")
    assert {path: after[path] for path in before} == before and len(after) == len(before) + 2
    taken = next(path for path in after if path.name.endswith(".time.json"))
    other = Results(folder / "results" / "other")
    cell = next(one for one in load_experiment(tmp_path / "other.toml").cells() if one.hash[:8] in taken.name)
    other.save_timing(cell, {**json.loads(taken.read_text()), "alone": None})  # of the other experiment: not clean
    kept, pool = files_in(folder / "results" / "other"), Pool(folder / "results")
    assert pool.load_timing(cell)["alone"] is True and "0 finished cells" in fedup(*where).out
    pool.save_timing(cell, pool.load_timing(cell))
    assert files_in(folder / "results" / "other") == kept
    write_page(folder)
    page = (folder / "pages" / "reproduction.html").read_text()
    assert "not taken yet" not in page and "4 not run yet" in page


def test_names_choose_tables_and_cells_and_unknown_ones_are_refused(folder):
    assert len(queue_of(folder, only=["first"]).cells) == 6
    assert len(queue_of(folder, only=["first", "fedup"]).cells) == 2
    assert len(queue_of(folder, only=["second", "fedup", "none", "digits"], seeds=[7]).cells) == 2
    with pytest.raises(SettingError, match="Did you mean 'second'"):
        queue_of(folder, only=["secnd"])


def test_a_failed_or_damaged_result_counts_as_none_and_a_result_of_the_own_folder_comes_first(folder, tmp_path):
    experiment = load_experiment(folder / "experiments" / "paper" / "first.toml")
    cell = experiment.cells([0], ["none"])[0]
    about = {"machine": {}, "device": "cpu", "wall_s": 1.0}
    old = Results(folder / "results" / "older")
    old.save(cell, {**about, "failed": {"error": "E", "message": "m"}})
    assert not Pool(folder / "results").is_done(cell)
    old.path(cell).write_text("{")
    assert not Pool(folder / "results").is_done(cell)
    old.save(cell, {**about, "metrics": {"r_a": 0.25}})
    pool, beside = Pool(folder / "results"), Pool(folder / "results")  # of two processes
    assert pool.is_done(cell) and pool.path(cell) == old.path(cell)
    pool.save(cell, {**about, "metrics": {"r_a": 0.5}})
    for known in (pool, beside, Pool(folder / "results")):
        assert known.load(cell)["metrics"]["r_a"] == 0.5 and known.path(cell).parts[-4] == "paper"
    assert old.load(cell)["metrics"]["r_a"] == 0.25
