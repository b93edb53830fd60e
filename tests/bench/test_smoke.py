"""The smoke experiment: every scenario, method and metric on digits and 1,000 images of MNIST, and its report."""

import csv
from pathlib import Path

import pytest
from tests.bench._progress import silent

from fedup.bench.experiment import load_experiment
from fedup.bench.experiment_report import write_report
from fedup.bench.metrics import columns, timed_keys
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.bench.summary import summarize
from fedup.errors import MissingDataError
from fedup.registry import names
from fedup.tasks.datasets import check_there

pytestmark = pytest.mark.slow
SMOKE = Path(__file__).parents[2] / "benchmarks" / "experiments" / "smoke.toml"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The experiment run (on digits alone where MNIST is not here), and what the report makes of it."""
    folder = tmp_path_factory.mktemp("smoke")
    experiment = load_experiment(SMOKE)
    try:
        check_there("mnist")
        cells = experiment.cells()
    except MissingDataError:
        cells = experiment.cells(only=["digits"])
    results = Results(folder / "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDUP_CACHE", str(folder / "cache"))
        events = list(run_cells(cells, results, progress=silent))
    blocks = summarize(experiment, results)
    paths = write_report(experiment, blocks, tables=folder / "tables", pages=folder / "pages")
    return experiment, events, blocks, paths


def test_every_scenario_method_and_figure_is_in_it_and_no_cell_fails(report):
    experiment, events, blocks, _ = report
    scenarios = {block.scenario.name for block in blocks}
    assert scenarios == {"class", "client", "sample", "clean_client", "random_samples"}
    assert {method.use for method in experiment.methods} == set(names("fedup.bench.methods"))
    assert {event.outcome for event in events} == {"done", "not supported"}
    rows, keys = [row for block in blocks for row in block.rows], {column.key for column in columns()}
    assert {key for row in rows for key in keys if row.figure(key) or row.uncounted(key)} == keys
    restored = [event.result["metrics"]["restored"] for event in events if event.outcome == "done"]
    assert set(restored) == {1.0, None}  # bit for bit, whatever can be taken back


def test_the_report_has_every_figure_in_csv_and_every_method_in_markdown_and_html(report):
    _, events, _, (markdown, table, page) = report
    with table.open(encoding="utf-8") as file:
        told = {
            (row["federation"], row["scenario"], row["method"], row["figure"]): row["value"]
            for row in csv.DictReader(file)
            if row["seed"] != "paper"
        }
    for event in events:
        for key, value in event.result.get("metrics", {}).items():
            if key in {column.key for column in columns()} and value is not None:
                shown = f"{key}_shared" if key in timed_keys() else key
                place = event.cell.group.federation, event.cell.group.scenario.name, event.cell.method.name, shown
                assert float(told[place]) == pytest.approx(value, rel=1e-4)
    for text in (markdown.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")):
        for event in events:
            assert event.cell.method.name in text
            assert f"{event.cell.group.federation}, {event.cell.group.scenario.name}" in text
        assert "attack did not take" in text
