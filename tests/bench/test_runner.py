"""An experiment is measured cell by cell: only what is missing, whatever was interrupted, whatever else fails."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli._in_process import contents

import fedup
from fedup.bench import runner
from fedup.bench.experiment import BenchCell, Experiment, load_experiment
from fedup.bench.results import Results
from fedup.bench.runner import BudgetSpentError, CellEvent, run_cells
from fedup.errors import ArtifactError, StorageError
from fedup.tasks.machine import describe_machine

FEDERATION = """
[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 200
batch_size = 32
"""
FAST = "[methods.fedup]\nsteps = 20\n[methods.finetune]\nrounds = 1\n"
SMALL = FEDERATION + "[scenarios.class]\n[scenarios.clean_client]\n[scenarios.client]\n" + FAST
TINY = FEDERATION + "[scenarios.class]\n[methods.none]\n"
METHOD = """
from dataclasses import dataclass
from fedup.bench.cost import Cost
from fedup.bench.task import Unlearned

@dataclass(frozen=True)
class Method:
    def supports(self, request):
        return True

    def unlearn(self, task):
{}
"""
_TIMES = ("time", "time_by_stage", "ahead_time", "overhead")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(tmp_path) -> Callable[[str], Experiment]:
    def read(text: str) -> Experiment:
        (tmp_path / "mine.toml").write_text(text)
        return load_experiment(tmp_path / "mine.toml")

    return read


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results")


class Clock:
    """Stands in for the module `time`: it goes on when it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Watch:
    """Progress that notes what is told, and may interrupt at the n-th word or move a clock on."""

    def __init__(self, stop_at: int | None = None, clock: Clock | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self._stop_at, self._clock = stop_at, clock

    def __call__(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))
        if len(self.told) == self._stop_at:
            raise KeyboardInterrupt
        if self._clock:
            self._clock.now += 0.1

    @property
    def trainings(self) -> list[str]:
        """What was trained, from its first word; a training that goes on says so once more."""
        return [what for what, done, _ in self.told if done == 0]


def run(cells: list[BenchCell], results: Results, watch: Watch | None = None, **how: Any) -> list[CellEvent]:
    return list(run_cells(cells, results, progress=watch or Watch(), **how))


def own_method(tmp_path: Path, body: str, name: str = "own") -> str:
    """A method of the user's own, as a table of an experiment."""
    path = tmp_path / f"{name}.py"
    path.write_text(METHOD.format("\n".join(f"        {line}" for line in body.splitlines())))
    return f'[methods.{name}]\nuse = "{path}"\n'


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    """A result without what depends on the clock; whether there was an effect at all does not."""
    found = copy.deepcopy(found)
    for name in ("wall_s", "at", "alone", "seen"):
        found.pop(name)
    for name in _TIMES:
        found.get("metrics", {}).pop(name, None)
    if "metrics" in found:
        found["metrics"]["time_to_effect"] = found["metrics"]["time_to_effect"] is None
    if "cost" in found:
        found["cost"]["time_s"] = sorted(found["cost"]["time_s"])
        found["cost"].pop("ahead_time_s")
        for moment in found["cost"]["path"]:
            moment.pop("time_s")
    return found


def all_of(cells: list[BenchCell], results: Results) -> dict[str, Any]:
    return {str(cell): timeless(results.load(cell)) for cell in cells}


# --- what is measured


def test_every_cell_is_measured_once_and_a_second_run_has_nothing_to_do(read, results):
    cells = read(SMALL).cells()
    events = run(cells, results)
    assert [event.cell for event in events] == cells
    assert [event.outcome for event in events] == ["done"] * 9
    assert [event.done for event in events] == list(range(1, 10))
    assert {event.total for event in events} == {9}
    assert all(results.is_done(cell) for cell in cells)
    before, watch = contents(results.folder), Watch()
    assert run(cells, results, watch) == []
    assert watch.told == []
    assert contents(results.folder) == before


def test_only_missing_cells_run_and_the_others_stay_byte_for_byte(read, results):
    cells = read(SMALL).cells()
    run(cells, results)
    expected = all_of(cells, results)
    gone = [cells[0], cells[4], cells[8]]
    for cell in gone:
        results.path(cell).unlink()
    before = contents(results.folder)
    events = run(cells, results)
    assert [event.cell for event in events] == gone
    assert [event.done for event in events] == [7, 8, 9]
    assert contents(results.folder).items() >= before.items()
    assert all_of(cells, results) == expected


def test_force_measures_again_to_the_same_figures(read, results):
    cells = read(TINY).cells()
    run(cells, results)
    before = all_of(cells, results)
    assert [event.cell for event in run(cells, results, force=True)] == cells
    assert all_of(cells, results) == before


def test_a_result_says_on_what_from_what_and_when_it_was_measured(read, results):
    cells = read(TINY).cells(seeds=[5])
    run(cells, results, note="two runs side by side")
    for cell in cells:
        found = results.load(cell)
        assert found["config"] == cell.config()
        assert found["hash"] == cell.hash
        assert found["seed"] == 5
        assert found["machine"] == describe_machine()
        assert found["device"] == "cpu"
        assert set(found["code"]) == {"commit", "changed"}
        assert found["at"].endswith("+00:00")
        assert found["note"] == "two runs side by side"
        assert found["story"]
        assert found["wall_s"] > 0
        assert found["metrics"]["r_a"] is not None
        assert found["cost"]["time_s"] is not None
        assert found["alone"] in (True, False, None)
        assert found["seen"]["load"] is not None


def test_code_that_git_does_not_know_is_named_by_the_environment(read, results, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no git
    monkeypatch.setenv("FEDUP_COMMIT", "abc123")
    cells = read(TINY).cells()[:1]
    run(cells, results)
    assert results.load(cells[0])["code"] == {"commit": "abc123", "changed": None}


def test_a_request_that_a_method_does_not_answer_is_told_and_done(read, results):
    cells = read(FEDERATION + "[scenarios.clean_client]\n[methods.logit_mask]\n").cells()
    assert [event.outcome for event in run(cells, results)] == ["done", "not supported"]
    found = results.load(cells[1])
    assert found["not_supported"] is True
    assert "metrics" not in found
    assert run(cells, results) == []


def test_retrain_has_no_gap_to_itself_and_the_others_are_compared_with_it(read, results):
    cells = read(SMALL + "[methods.none]\n").cells(only=["class"])
    run(cells, results)
    figures = {cell.method.name: results.load(cell)["metrics"] for cell in cells}
    retrained = figures["retrain"]
    for name, found in figures.items():
        assert found["gap_r_a"] == pytest.approx(found["r_a"] - retrained["r_a"], abs=1e-12), name
        assert found["gap_f_a"] == pytest.approx(found["f_a"] - retrained["f_a"], abs=1e-12), name
    assert all(value in (0, None) for name, value in retrained.items() if name.startswith("gap"))
    assert retrained["tv"] == retrained["kl"] == 0
    assert figures["none"]["tv"] > 0


@pytest.mark.parametrize("how", ["its result is there", "in this run", "its cell is not asked for"])
def test_the_reference_is_the_same_wherever_it_comes_from(read, results, tmp_path, monkeypatch, how):
    retrain, fedup, finetune = read(SMALL).cells(only=["class"])
    run([retrain, fedup, finetune], results)
    expected = all_of([fedup, finetune], results)
    other = Results(tmp_path / "other")
    if how == "its result is there":  # and the models in the cache are gone
        other.save(retrain, {name: value for name, value in results.load(retrain).items() if name != "hash"})
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "another-cache"))
    run([retrain, fedup, finetune] if how != "its cell is not asked for" else [fedup, finetune], other)
    assert all_of([fedup, finetune], other) == expected


# --- federations are shared


def test_a_federation_is_trained_once_for_all_methods_and_scenarios_that_leave_it_as_it_is(read, results):
    watch = Watch()
    run(read(SMALL).cells(), results, watch)
    learned = [what for what in watch.trainings if "the federation learns" in what]
    # the class and the honest client leave the federation as it is; the liar changes it
    assert learned == ["digits, seed 0: the federation learns"] * 2
    assert watch.trainings.count("Retrain") == 3  # the cells' own: what is measured is done, not taken from a cache
    assert not any("reference" in what for what in watch.trainings)


def test_another_experiment_finds_the_federation_and_the_reference_trained(read, results, tmp_path):
    cells = read(SMALL).cells(only=["class"])
    run(cells, results)
    watch = Watch()
    run(cells[1:], Results(tmp_path / "other"), watch)
    assert [what for what in watch.trainings if "learns" in what or "etrain" in what] == []


def test_the_reference_is_trained_where_nobody_has(read, results):
    watch = Watch()
    run(read(SMALL).cells(only=["class", "fedup"]), results, watch)
    assert watch.trainings[:2] == [
        "digits, seed 0: the federation learns",
        "digits, seed 0: Retrain, the reference",
    ]


def test_each_seed_has_a_federation_of_its_own(read, results):
    cells = read(TINY).cells(seeds=[0, 1])
    watch = Watch()
    run(cells, results, watch)
    assert sum("learns" in what for what in watch.trainings) == 2
    stories = {cell.group.recipe.seed: results.load(cell)["story"] for cell in cells}
    assert stories[0] != stories[1]


# --- interrupted anywhere


def test_interrupted_anywhere_the_same_command_gives_the_same_results(read, tmp_path, monkeypatch):
    cells = read(FEDERATION + "[scenarios.client]\n" + FAST).cells()
    whole, watch = Results(tmp_path / "whole"), Watch()
    run(cells, whole, watch)
    expected, words = all_of(cells, whole), len(watch.told)
    assert words >= 10
    for stop_at in range(1, words + 1):
        monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / f"cache-{stop_at}"))
        results = Results(tmp_path / f"results-{stop_at}")
        with pytest.raises(KeyboardInterrupt):
            run(cells, results, Watch(stop_at))
        kept = contents(results.folder) if results.folder.exists() else {}
        run(cells, results)
        assert contents(results.folder).items() >= kept.items(), stop_at
        assert all_of(cells, results) == expected, stop_at


def test_a_run_that_is_interrupted_again_and_again_gets_on(read, results, tmp_path):
    cells = read(TINY).cells()
    interrupted = 0
    while interrupted < 20:
        try:
            run(cells, results, Watch(6))  # Retrain's cell itself is measured in one go: four words
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert 0 < interrupted < 20
    assert all(results.is_done(cell) for cell in cells)


def test_what_reads_the_events_may_stop_listening_at_any_time(read, results):
    cells = read(TINY).cells()
    events = run_cells(cells, results, progress=Watch())
    assert next(events).cell == cells[0]
    events.close()
    assert results.is_done(cells[0])
    assert [event.cell for event in run(cells, results)] == cells[1:]


# --- what fails


def test_a_method_that_fails_is_recorded_the_others_go_on_and_it_is_tried_again(read, results, tmp_path):
    failing = own_method(tmp_path, "raise RuntimeError('out of ideas')")
    cells = read(FEDERATION + "[scenarios.class]\n" + failing + "[methods.none]\n").cells()
    assert [event.outcome for event in run(cells, results)] == ["done", "failed", "done"]
    found = results.load(cells[1])
    assert found["failed"]["error"] == "RuntimeError"
    assert found["failed"]["message"] == "out of ideas"
    assert "own.py" in found["failed"]["where"]
    assert "metrics" not in found
    assert {"machine", "device", "code", "at", "config", "hash", "seed"} <= set(found)
    before = contents(results.folder)
    assert [(event.cell, event.outcome) for event in run(cells, results)] == [(cells[1], "failed")]
    unchanged = {name for name, digest in contents(results.folder).items() if before[name] == digest}
    assert len(unchanged) >= 2
    own_method(tmp_path, "return Unlearned(task.model, Cost())")  # mended
    mended = load_experiment(tmp_path / "mine.toml").cells()
    assert [(event.cell.method.name, event.outcome) for event in run(mended, results)] == [("own", "done")]
    assert "failed" not in results.load(mended[1])


WRONG = {
    "gives nothing": "return None",
    "gives another thing": "return task.model",
    "gives a model that does not answer": "return Unlearned(None, Cost())",
    "gives costs that are no plain numbers": "import torch\nreturn Unlearned(task.model, Cost(bytes_up=torch.ones(1)))",
    "gives clients that are none": "return Unlearned(task.model, Cost(clients={None, 1}))",
    "cannot go back": "return Unlearned(task.model, Cost(), restore=lambda: 1 / 0)",
    "says a lot": "raise ValueError('a\\nb' * 1000 + '\\udcff')",
    "has too little memory": "raise MemoryError",
    "does not end to call itself": "def again(): again()\nagain()",
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_whatever_a_method_does_wrong_it_alone_fails(read, results, tmp_path, body):
    cells = read(FEDERATION + "[scenarios.class]\n" + own_method(tmp_path, body) + "[methods.none]\n").cells()
    events = run(cells, results)
    assert [event.outcome for event in events] == ["done", "failed", "done"]
    assert not results.is_done(cells[1])
    json.dumps(events[1].result)  # it can be told


def test_a_method_that_changes_the_model_it_gets_does_not_change_what_others_get(read, results, tmp_path):
    honest = read(TINY).cells()
    run(honest, results)
    expected = timeless(results.load(honest[1]))
    spoiling = own_method(
        tmp_path,
        "import torch\nwith torch.no_grad():\n    for p in task.model.parameters(): p.zero_()\n"
        "return Unlearned(task.model, Cost())",
    )
    other = Results(tmp_path / "other")
    cells = read(FEDERATION + "[scenarios.class]\n" + spoiling + "[methods.none]\n").cells()
    run(cells, other)
    assert timeless(other.load(cells[2])) == expected


def test_a_data_set_that_fails_fails_all_its_cells_but_not_those_of_others(read, results, tmp_path):
    source = tmp_path / "broken_data.py"
    source.write_text(
        "from fedup.tasks.datasets import Images\n"
        "INPUT = Images(1, 28, 28, mean=(0.5,), std=(0.5,))\n"
        "def load():\n    raise OSError('the tape is torn')\n"
    )
    cells = read(f'[[federations]]\ndata = "{source}"\nrounds = 1\n' + TINY).cells()
    events = run(cells, results)
    assert [(event.cell.group.recipe.data, event.outcome) for event in events] == [
        (str(source), "failed"),
        (str(source), "failed"),
        ("digits", "done"),
        ("digits", "done"),
    ]
    assert "torn" in results.load(cells[0])["failed"]["message"]


def test_a_scenario_that_fails_fails_all_its_cells_but_not_those_of_others(read, results):
    text = (
        TINY + '[scenarios.nobody]\nuse = "client"\nclient = 99\n[scenarios.nothing]\nuse = "class"\nclasses = [12]\n'
    )
    cells = read(text).cells()
    outcomes = {(event.cell.group.scenario.name, event.outcome) for event in run(cells, results)}
    assert outcomes == {("class", "done"), ("nobody", "failed"), ("nothing", "failed")}
    assert "no client 99" in results.load(cells[2])["failed"]["message"]


def test_a_reference_that_fails_is_recorded_at_each_cell(read, results):
    # A learning rate with which nothing stays finite.
    cells = read(TINY.replace("rounds = 2", "rounds = 2\nlr = 1e30")).cells()
    assert [event.outcome for event in run(cells, results)] == ["failed", "failed"]
    assert "diverged" in results.load(cells[0])["failed"]["message"]


def test_a_disk_that_takes_nothing_stops_the_run_and_is_no_failure_of_the_cell(read, results, tmp_path, monkeypatch):
    cells = read(TINY).cells()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "file"))  # federations cannot be kept
    with pytest.raises(StorageError, match="Could not write"):
        run(cells, results)
    assert not results.folder.exists()
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "gone").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(StorageError, match="Could not write"):
        run(cells, Results(tmp_path / "gone"))  # results cannot
    assert [event.outcome for event in run(cells, results)] == ["done", "done"]


def test_a_damaged_result_stops_before_any_work(read, results):
    cells = read(TINY).cells()
    run(cells, results)
    results.path(cells[1]).write_text("{")
    results.path(cells[0]).unlink()
    watch = Watch()
    with pytest.raises(ArtifactError, match="is not a result"):
        run(cells, results, watch)
    assert watch.told == []
    assert results.load(cells[0]) is None


# --- a budget


def test_no_time_at_all_stops_before_the_first_cell(read, results):
    with pytest.raises(BudgetSpentError):
        run(read(TINY).cells(), results, budget_s=0)
    assert not results.folder.exists()


def test_a_budget_stops_before_its_end_and_the_next_run_goes_on(read, results, tmp_path):
    slow = own_method(tmp_path, "import time\ntime.sleep(0.4)\nreturn Unlearned(task.model, Cost())", "slow")
    cells = read(TINY + slow).cells(seeds=[0, 1, 2])
    run([cell for cell in cells if cell.method.name != "slow"], results)  # trained before, so that cells take alike
    done, runs = len(cells) - 3, 0
    while done < len(cells):
        events, moments = [], [time.perf_counter()]
        with suppress(BudgetSpentError):
            for event in run_cells(cells, results, progress=Watch(), budget_s=1.0):
                events.append(event)
                moments.append(time.perf_counter())
        longest = max(later - earlier for earlier, later in pairwise(moments))
        assert time.perf_counter() - moments[0] < max(1.0, 2 * longest) + 0.2  # the machine may be busy
        assert len(events) >= 1
        done, runs = done + len(events), runs + 1
    assert runs >= 2
    assert all(results.is_done(cell) for cell in cells)


def test_a_training_that_a_budget_stopped_goes_on_to_the_same_results(read, results, tmp_path, monkeypatch):
    cells = read(TINY.replace("rounds = 2", "rounds = 12")).cells()
    run(cells, results)
    expected = all_of(cells, results)
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "another"))
    other = Results(tmp_path / "other")
    trained, clock = 0, Clock()
    for _ in range(2):
        watch = Watch(clock=clock)
        with monkeypatch.context() as patch, pytest.raises(BudgetSpentError):
            patch.setattr(runner, "time", clock)  # a busy machine could spend the budget before the first round
            run(cells, other, watch, budget_s=0.6)
        assert watch.trainings == ["digits, seed 0: the federation learns"]
        trained += len(watch.told) - 1
    assert 0 < trained < 12
    watch = Watch()
    run(cells, other, watch)
    assert watch.told[1][1] > 1  # it went on
    assert all_of(cells, other) == expected


def test_a_budget_that_suffices_is_no_budget(read, results):
    assert len(run(read(TINY).cells(), results, budget_s=600)) == 2


def test_the_time_left_is_nothing_at_the_end_and_known_from_results_that_are_there(read, results):
    cells = read(SMALL).cells()
    events = run(cells, results)
    assert events[-1].left_s == 0
    assert events[-2].left_s > 0
    more = read(SMALL).cells(seeds=[0, 1])
    first = next(run_cells(more, results, progress=Watch()))
    assert first.left_s > 0


# --- two at once


def test_two_processes_at_once_give_what_one_gives(read, results, tmp_path):
    experiment = read(SMALL)
    cells = experiment.cells(seeds=[0, 1], only=["class"])
    run(cells, results)
    expected = all_of(cells, results)
    both = tmp_path / "both"
    command = [sys.executable, "-m", "fedup", "bench", "run", str(tmp_path / "mine.toml"), "--results", str(both)]
    command += ["--seeds", "0-1", "--only", "class", "--device", "cpu"]
    environment = {**os.environ, "FEDUP_CACHE": str(tmp_path / "shared"), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        assert "6 of 6 cells done, 0 failed, 0 left" in " ".join(out.split())
    found = Results(both / "mine")
    torch.set_num_threads(1)
    different = {"machine"}
    for cell in cells:
        ours, theirs = timeless(found.load(cell)), expected[str(cell)]
        assert {k: v for k, v in ours.items() if k not in different} == {
            k: v for k, v in theirs.items() if k not in different
        }
    assert len([path for path in both.rglob("*") if path.is_file()]) == len(cells)  # no rest
    assert {path.suffix for path in (tmp_path / "shared" / "federations").iterdir()} == {".safetensors", ".users"}


# --- what a method says of its answer


def test_what_a_method_says_of_its_answer_is_kept_with_the_result(read, results, tmp_path):
    telling = own_method(tmp_path, "return Unlearned(task.model, Cost(), about={'notes': ['ρ'], 'rank': 3})")
    cells = read(TINY + telling).cells()
    run(cells, results)
    about = {cell.method.name: results.load(cell)["about"] for cell in cells}
    assert about["own"] == {"notes": ["ρ"], "rank": 3}
    assert about["none"] == {"did": "nothing: the original model"}


def test_a_method_that_says_what_no_file_can_hold_fails_alone(read, results, tmp_path):
    telling = own_method(tmp_path, "return Unlearned(task.model, Cost(), about={'set': {1, 2}})")
    assert [event.outcome for event in run(read(TINY + telling).cells(), results)] == ["done", "done", "failed"]


SPELLED_OUT = {  # by scenario
    "class": "ratio = 0.1",
    "clean_client": "ratio = 0.8",
    "random_samples": "ratio = 0.5",
}


@pytest.mark.parametrize("scenario", SPELLED_OUT)
def test_the_papers_preset_is_what_the_papers_settings_are_one_by_one(read, results, scenario):
    paper = '[methods.paper]\nuse = "fedup"\nsteps = 20\npreset = "paper"\nratio = 0.33\nguard = true\n'
    by_hand = (
        f'[methods.by_hand]\nuse = "fedup"\nsteps = 20\n{SPELLED_OUT[scenario]}\nsigma = 0.001\ncache = false\n'
        'class_policy = "remap"\nguard = false\ngentle = false\nfilter = "bottleneck"\n'
    )
    ours = '[methods.fedup]\nsteps = 20\nfilter = "bottleneck"\n'
    cells = read(f"{FEDERATION}[scenarios.{scenario}]\n{paper}{by_hand}{ours}").cells()
    run(cells, results)
    found = {cell.method.name: timeless(results.load(cell)) for cell in cells}
    for part in ("metrics", "about"):
        assert found["paper"][part] == found["by_hand"][part]
    assert found["paper"]["metrics"] != found["fedup"]["metrics"]


@pytest.mark.parametrize(("kind", "erased"), [("bottleneck", False), ("erasure", True), ("both", True)])
def test_the_result_of_fedup_says_where_samples_were_erased(read, results, kind, erased):
    text = f'{FEDERATION}[scenarios.sample]\nshare = 0.5\n[methods.fedup]\nsteps = 20\nfilter = "{kind}"\n'
    cell = read(text).cells()[1]
    run([cell], results)
    about = results.load(cell)["about"]
    assert set(about) == {"did", "erasure", "notes", "privacy"}
    assert bool(about["erasure"]) is erased


def test_where_a_cell_failed_is_told_without_paths_of_this_machine(read, results, tmp_path):
    failing = own_method(tmp_path, "return task.kept()")  # no history was kept: an error of the package's own
    cells = read(TINY + failing).cells()
    run(cells, results)
    where = results.load(cells[-1])["failed"]["where"]
    assert 'File "fedup/bench/task.py"' in where
    assert str(Path(fedup.__file__).parents[1]) not in where
