"""The README's table of results."""

from pathlib import Path

from tests.bench._made_up import MadeUp

from fedup.bench.experiment import load_experiment
from fedup.bench.readme_table import BEGIN, END, SOURCES, results_table, write_results
from fedup.bench.results import Results
from fedup.bench.summary import summarize

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def test_the_readme_shows_what_the_result_files_hold(tmp_path):
    experiments = [load_experiment(BENCHMARKS / "experiments" / f"{name}.toml") for name in SOURCES]
    summed = [(each, summarize(each, Results(BENCHMARKS / "results" / each.name))) for each in experiments]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{results_table(summed)}\n{END}" in text
    (tmp_path / "README.md").write_text(text.replace(results_table(summed), "old"), encoding="utf-8")
    write_results(summed, tmp_path / "benchmarks")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_other_experiments_and_scenarios_that_are_not_finished_are_left_out(tmp_path):
    made_up = MadeUp(tmp_path)
    made_up.put("class", "fedup", {0: {"r_a": 0.9, "f_a": 0.0}})
    blocks = summarize(made_up.experiment, made_up.results)
    assert results_table([(made_up.experiment, blocks)]) == ""
    for name in SOURCES:
        (tmp_path / f"{name}.toml").write_text((tmp_path / "made_up.toml").read_text())
        assert results_table([(load_experiment(tmp_path / f"{name}.toml"), blocks)]) == ""
