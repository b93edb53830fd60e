"""Clean times are taken beside results, from answers of the same kind, and only what is clean counts."""

import json
from pathlib import Path

import pytest
from tests.bench._made_up import MACHINE, TOML, MadeUp
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
rows = 200
batch_size = 32
[scenarios.class]
[scenarios.client]
[methods.none]
[methods.fedup]
steps = 20
[methods.logit_mask]
[methods.eraseclient]
"""


def silent(what: str, done: int, total: int) -> None:
    pass


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


def test_results_stay_byte_for_byte_and_each_has_three_times_and_their_median(measured, results, idle):
    before = contents(results.folder)
    cells = finished(measured[1], results)
    events = list(time_cells(cells, results, progress=silent))
    assert [event.cell for event in events] == cells
    assert not [event.error for event in events if event.error]
    assert contents(results.folder).items() >= before.items()
    for cell in cells:
        taken = results.load_timing(cell)
        times = sorted(run["time"] for run in taken["runs"])
        assert len(times) == 3
        assert taken["median"]["time"] == times[1]
        assert is_clean(taken)
        assert {"machine", "device", "code", "at", "alone", "seen", "warm_up_s"} <= taken.keys()
        assert taken["median"]["overhead"] > 0


def test_there_is_one_warm_up_and_three_runs_and_the_warm_up_is_not_counted(measured, results, idle, monkeypatch):
    asked = []
    answer = timing._answer

    def counted(cell, task):
        asked.append(cell)
        cost, model = answer(cell, task)
        cost.time_s = {"all": float(len(asked))}
        return cost, model

    monkeypatch.setattr(timing, "_answer", counted)
    cell = next(cell for cell in measured[1] if cell.method.name == "fedup")
    list(time_cells([cell], results, progress=silent))
    assert asked == [cell] * 4
    taken = results.load_timing(cell)
    assert taken["warm_up_s"] == 1.0
    assert [run["time"] for run in taken["runs"]] == [2.0, 3.0, 4.0]
    assert taken["median"]["time"] == 3.0


def test_a_machine_without_models_trains_the_federation_first_and_times_the_same_stages(
    measured, results, idle, monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "empty"))
    cells = [cell for cell in measured[1] if cell.method.name in ("retrain", "fedup")]
    for event in time_cells(cells, results, progress=silent):
        stages = set(results.load(event.cell)["cost"]["time_s"])
        assert [set(run["time_by_stage"]) for run in event.timing["runs"]] == [stages] * 3
        if event.cell.method.name == "fedup":  # sent anew in each run, and no part of the time
            assert len({run["ahead_time"] for run in event.timing["runs"]}) == 3


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


def test_only_finished_cells_without_clean_times_are_timed(measured, results, idle, monkeypatch):
    cells = measured[1]
    names = [f"{cell.group.scenario.name} {cell.method.name}" for cell in finished(cells, results)]
    assert "client logit_mask" not in names  # not for such requests
    assert "class logit_mask" in names
    first = finished(cells, results)[:2]
    list(time_cells(first[:1], results, progress=silent))
    monkeypatch.setattr(idle, "alone", False)
    list(time_cells(first[1:], results, progress=silent))
    left = to_time(cells, results, device="cpu")
    assert first[0] not in left
    assert first[1] in left  # shared times do not count
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


def test_a_budget_ends_between_cells_and_what_is_timed_stays(measured, results, idle, monkeypatch):
    cells = finished(measured[1], results)
    events = time_cells(cells, results, progress=silent, budget_s=1e9)
    assert next(events).cell == cells[0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 1e12)
    with pytest.raises(BudgetSpentError):
        next(events)
    monkeypatch.undo()
    assert [cell for cell in cells if results.load_timing(cell)] == cells[:1]


def test_times_of_another_configuration_or_damaged_ones_are_refused(measured, results, idle):
    one, other = finished(measured[1], results)[:2]
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


def test_an_effect_that_was_never_reached_is_no_matter_of_clocks(tmp_path):
    made_up = MadeUp(tmp_path)
    made_up.put("class", "fedup", {0: {**FIGURES, "time_to_effect": None}}, clean=False)
    made_up.put("class", "retrain", {0: FIGURES}, clean=False)
    assert "| fedup | 100 s ‡ | never |" in reported(made_up, tmp_path)


def test_a_document_is_filled_between_its_marks_and_left_alone_without(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    assert fill(readme, "new") == [readme]
    assert readme.read_text() == f"Before.\n{BEGIN}\nnew\n{END}\nAfter.\n"
    assert fill(readme, "new") == [readme]
    assert readme.read_text().count("new") == 1
    (tmp_path / "other.md").write_text("Nothing to fill.\n")
    assert fill(tmp_path / "other.md", "new") == fill(tmp_path / "missing.md", "new") == []


def test_what_a_result_file_holds_is_plain_json(measured, results, idle):
    cell = finished(measured[1], results)[0]
    list(time_cells([cell], results, progress=silent, note="a note"))
    assert json.loads(results.timing_path(cell).read_text())["note"] == "a note"
