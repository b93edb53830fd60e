"""The smoke experiment: every scenario, method and metric on digits."""

from pathlib import Path

import pytest
from tests.bench._progress import silent

from fedup.bench.experiment import load_experiment
from fedup.bench.metrics import columns, metric
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.bench.summary import summarize
from fedup.registry import names

pytestmark = pytest.mark.slow
SMOKE = Path(__file__).parents[2] / "benchmarks" / "experiments" / "smoke.toml"


def test_every_scenario_method_and_figure_is_in_it_and_no_cell_fails(tmp_path, cache):
    experiment, results = load_experiment(SMOKE), Results(tmp_path / "results")
    events = list(run_cells(experiment.cells(only=["digits"]), results, progress=silent))
    blocks = summarize(experiment, results)
    scenarios = {block.scenario.name for block in blocks}
    assert scenarios == {"class", "client", "sample", "clean_client", "random_samples"}
    assert {method.use for method in experiment.methods} == set(names("fedup.bench.methods"))
    assert {event.outcome for event in events} == {"done", "not supported"}
    rows, keys = [row for block in blocks for row in block.rows], {column.key for column in columns()}
    of_deltas = {column.key for column in metric("delta_gradient").COLUMNS}  # so few rounds leave nothing to change
    assert {key for row in rows for key in keys if row.figure(key) or row.uncounted(key)} | of_deltas == keys
    restored = [event.result["metrics"]["restored"] for event in events if event.outcome == "done"]
    assert set(restored) == {1.0, None}  # bit for bit, whatever can be taken back
