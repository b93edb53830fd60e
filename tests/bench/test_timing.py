"""Clean times are taken beside results, from answers of the same kind, and only what is clean counts."""

from pathlib import Path

import pytest
from tests.bench._made_up import MACHINE, TOML, MadeUp
from tests.bench._progress import silent
from tests.cli._in_process import contents

from fedup.bench import timing
from fedup.bench.alone import Alone
from fedup.bench.experiment import BenchCell, load_experiment
from fedup.bench.experiment_report import write_report
from fedup.bench.results import Results
from fedup.bench.runner import BudgetSpentError, run_cells
from fedup.bench.summary import summarize
from fedup.bench.times_table import BEGIN, END, NONE, fill, short_table, times_table
from fedup.bench.timing import effect_moment, finished, in_order, is_clean, time_cells, to_time
from fedup.bench.verdicts import verdicts
from fedup.errors import ArtifactError

SMALL = """
[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 90
batch_size = 32
[scenarios.class]
[scenarios.client]
[methods.none]
[methods.fedup]
steps = 5
[methods.logit_mask]
[methods.eraseclient]
"""


class AlwaysAlone:
    """Stands in for the look at a machine that others use while tests run."""

    alone: bool | None = True

    def __init__(self, device: str) -> None:
        pass

    def finish(self, *, idle: bool = False) -> Alone:
        return Alone(self.alone, {"others": []})


@pytest.fixture
def idle(monkeypatch) -> type[AlwaysAlone]:
    monkeypatch.setattr(timing, "AloneCheck", AlwaysAlone)
    return AlwaysAlone


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, list[BenchCell]]:
    """A folder with results of all cells, and a cache."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "mine.toml").write_text(SMALL)
    cells = load_experiment(folder / "mine.toml").cells()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDUP_CACHE", str(folder / "cache"))
        list(run_cells(cells, Results(folder / "results"), progress=silent))
    return folder, cells


@pytest.fixture
def results(measured, tmp_path, monkeypatch) -> Results:
    monkeypatch.setenv("FEDUP_CACHE", str(measured[0] / "cache"))
    store = Results(tmp_path / "results")
    for cell in measured[1]:
        store.path(cell).parent.mkdir(parents=True, exist_ok=True)
        store.path(cell).write_bytes(Results(measured[0] / "results").path(cell).read_bytes())
    return store


# --- what is timed


def test_results_stay_byte_for_byte_and_each_has_three_times_after_a_warm_up_and_their_median(
    measured, results, idle, monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "empty"))  # a machine without models trains the federation first
    before, answer, asked = contents(results.folder), timing._answer, []

    def counted(cell, task):
        cost, model = answer(cell, task)
        asked.append((cell, cost.total_time_s))
        return cost, model

    monkeypatch.setattr(timing, "_answer", counted)
    cells = [cell for cell in finished(measured[1], results) if cell.method.name in ("retrain", "fedup", "eraseclient")]
    events = list(time_cells(cells, results, progress=silent, note="a note"))
    assert [event.cell for event in events] == cells
    assert [cell for cell, _ in asked] == [cell for cell in cells for _ in range(4)]
    assert not [event.error for event in events if event.error]
    assert contents(results.folder).items() >= before.items()
    for place, cell in enumerate(cells):
        taken, times = results.load_timing(cell), [seconds for _, seconds in asked[4 * place : 4 * place + 4]]
        assert is_clean(taken)
        assert (taken["warm_up_s"], [run["time"] for run in taken["runs"]]) == (times[0], times[1:])
        assert taken["median"]["time"] == sorted(times[1:])[1]
        stages = set(results.load(cell)["cost"]["time_s"])
        assert all(set(run["time_by_stage"]) == stages for run in taken["runs"])
        assert {"machine", "device", "code", "at", "alone", "seen"} <= taken.keys() and taken["note"] == "a note"
        assert taken["median"]["overhead"] > 0
        if cell.method.name == "fedup":  # sent anew in each run, and no part of the time
            assert len({run["ahead_time"] for run in taken["runs"]}) == 3


def test_the_moment_of_the_effect_is_the_results_and_its_time_is_new():
    path = [{"time_s": 1.0}, {"time_s": 2.0}, {"time_s": 3.0}]
    for effect, moment in ((None, None), (2.0, 1), (3.5, -1)):
        assert effect_moment({"metrics": {"time_to_effect": effect}, "cost": {"path": path}}) == moment
    cost = timing.Cost(time_s={"train": 9.0}, path=[{"time_s": 4.0}, {"time_s": 5.0}])
    assert [timing._figures(cost, moment)["time_to_effect"] for moment in (None, 1, -1, 7)] == [None, 5.0, 9.0, None]


def test_a_method_that_fails_leaves_no_times_and_the_others_go_on(measured, results, idle, monkeypatch):
    answer = timing._answer

    def failing(cell, task):
        if cell.method.name == "none":
            raise RuntimeError("out of\nideas")
        return answer(cell, task)

    monkeypatch.setattr(timing, "_answer", failing)
    cells = [cell for cell in measured[1] if cell.method.name in ("none", "logit_mask") and "class" in str(cell)]
    events = list(time_cells(cells, results, progress=silent))
    assert [event.error for event in events] == ["RuntimeError: out of ideas", ""]
    assert results.load_timing(cells[0]) is None


# --- which, and in which order


def test_clients_come_before_classes_and_retrain_and_fedup_before_the_others(measured):
    found = [(cell.group.scenario.name, cell.method.name) for cell in in_order(measured[1])]
    assert [scenario for scenario, _ in found] == ["client"] * 5 + ["class"] * 5
    assert [method for _, method in found[:3]] == ["retrain", "fedup", "none"]


def test_only_finished_cells_without_clean_times_are_timed_within_the_budget(measured, results, idle, monkeypatch):
    cells = measured[1]
    names = [f"{cell.group.scenario.name} {cell.method.name}" for cell in finished(cells, results)]
    assert "client logit_mask" not in names  # not for such requests
    assert "class logit_mask" in names
    first = [cell for cell in finished(cells, results) if cell.method.name == "none"]
    events = time_cells(first, results, progress=silent, budget_s=1e9)
    assert next(events).cell == first[0]
    with monkeypatch.context() as patch, pytest.raises(BudgetSpentError):
        patch.setattr(timing.time, "perf_counter", lambda: 1e12)
        next(events)
    assert [cell for cell in cells if results.load_timing(cell)] == first[:1]
    monkeypatch.setattr(idle, "alone", False)
    list(time_cells(first[1:], results, progress=silent))
    left = to_time(cells, results, device="cpu")
    assert first[0] not in left and first[1] in left  # shared times do not count
    assert to_time(cells, results, device="cpu", force=True) == finished(cells, results)
    assert first[0] in to_time(cells, results, device="cuda")  # times of another device


@pytest.mark.parametrize(
    "change", [{"alone": False}, {"alone": None}, {"runs": [{"time": 1.0}] * 2}, {"alone": "yes"}, {"runs": []}]
)
def test_times_that_are_not_three_of_a_device_alone_are_not_clean(change):
    taken = {"alone": True, "runs": [{"time": 1.0}] * 3}
    assert is_clean(taken)
    assert not is_clean({**taken, **change})
    assert not is_clean(None)


def test_times_of_another_configuration_or_damaged_ones_are_refused(measured, results, idle):
    one, other = [cell for cell in finished(measured[1], results) if cell.method.name == "none"]
    list(time_cells([one], results, progress=silent))
    results.timing_path(other).write_bytes(results.timing_path(one).read_bytes())
    with pytest.raises(ArtifactError, match="another configuration"):
        results.load_timing(other)
    results.timing_path(other).write_text("{")
    with pytest.raises(ArtifactError, match="not a result"):
        results.load_timing(other)


# --- only clean times count


FIGURES = {"r_a": 0.9, "f_a": 0.0, "tv": 0.3, "time": 100.0, "time_to_effect": 50.0}


def reported(made_up: MadeUp, folder: Path) -> str:
    blocks = summarize(made_up.experiment, made_up.results)
    return write_report(made_up.experiment, blocks, tables=folder, pages=folder / "pages")[0].read_text()


def test_shared_times_are_shown_with_a_mark_and_enter_no_goal_no_sentence_and_no_ratio(tmp_path):
    made_up = MadeUp(tmp_path, TOML + '[goals.mnist-lenet5.class]\ntime = "<= 5"\nr_a = ">= 0.8"\n')
    fast = {**FIGURES, "time": 1.0, "time_to_effect": 1.0}
    for method, figures in (("retrain", FIGURES), ("fedup", FIGURES), ("logit_mask", fast)):
        made_up.put("class", method, dict.fromkeys(range(3), figures), clean=False)
    blocks = summarize(made_up.experiment, made_up.results)
    assert verdicts(blocks) == []
    assert blocks[0].row("fedup").figure("time") is None
    text = reported(made_up, tmp_path)
    assert "| fedup | 100 ± 0 s ‡ | 50.0 ± 0.0 s ‡ |" in text
    assert "‡ shared: measured once" in text
    assert "fedup.time <= 5 | – | – | not judged: no clean time | 0 |" in text
    assert "fedup.r_a >= 0.8 | 0.900 | 0.800 | met | 3 |" in text
    assert times_table([(made_up.experiment, blocks)]).endswith(NONE)
    assert short_table([(made_up.experiment, blocks)]) == NONE
    assert "time,100" not in (tmp_path / "made_up.csv").read_text()
    assert "time_shared,100" in (tmp_path / "made_up.csv").read_text()


def test_clean_times_take_their_place_without_a_mark(tmp_path):
    made_up = MadeUp(tmp_path, TOML + '[goals.mnist-lenet5.class]\ntime = "<= 5"\n')
    for method, seconds in (("retrain", 8.0), ("fedup", 2.0), ("logit_mask", 0.5)):
        made_up.put("class", method, dict.fromkeys(range(3), FIGURES), clean=False)
        (cell,) = made_up.experiment.cells(seeds=[0], only=["class", method])
        made_up.put_timing(cell, {"time": seconds, "time_to_effect": seconds})
    blocks = summarize(made_up.experiment, made_up.results)
    assert verdicts(blocks) == [
        "mnist-lenet5, class: logit_mask does better than FedUP on time to effect (0.50 s against 2.00 s)."
    ]
    text = reported(made_up, tmp_path)
    assert "| fedup | 2.00 s | 2.00 s |" in text
    assert "‡" not in text
    assert "median of three runs) with seed 0, on a processor, 2 threads, torch 2.13." in text
    assert "fedup.time <= 5 | 2.000 | 5.000 | met | 1 |" in text
    summed = [(made_up.experiment, blocks)]
    assert "| mnist-lenet5 | class | logit_mask | 0 | 0.50 s | 0.50 s … 0.50 s | 16 |" in times_table(summed)
    assert "| mnist-lenet5 | class | 0 | 8.00 s | 2.00 s | 4.0 |" in short_table(summed)


def test_times_of_two_machines_make_no_ratio(tmp_path):
    made_up = MadeUp(tmp_path)
    made_up.put("class", "retrain", {0: FIGURES})
    made_up.put("class", "none", {0: FIGURES})
    made_up.put("class", "fedup", {0: FIGURES}, clean=False)
    (cell,) = made_up.experiment.cells(seeds=[0], only=["class", "fedup"])
    made_up.put_timing(cell, {"time": 1.0}, machine={**MACHINE, "processor": "another"})
    blocks = summarize(made_up.experiment, made_up.results)
    assert blocks[0].row("retrain").figure("time").mean == 100
    assert blocks[0].row("fedup").figure("time") is None
    assert short_table([(made_up.experiment, blocks)]) == NONE


def test_a_document_is_filled_between_its_marks_and_left_alone_without(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    assert fill(readme, "new") == [readme]
    assert readme.read_text() == f"Before.\n{BEGIN}\nnew\n{END}\nAfter.\n"
    assert fill(readme, "new") == [readme]
    assert readme.read_text().count("new") == 1
    (tmp_path / "other.md").write_text("Nothing to fill.\n")
    assert fill(tmp_path / "other.md", "new") == fill(tmp_path / "missing.md", "new") == []
