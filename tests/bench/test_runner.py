"""An experiment is measured cell by cell: only what is missing, whatever was interrupted, whatever else fails."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench._progress import Watch
from tests.cli._in_process import contents

import fedup
from fedup.bench import runner
from fedup.bench.experiment import BenchCell, load_experiment
from fedup.bench.results import Results
from fedup.bench.runner import BudgetSpentError, CellEvent, run_cells
from fedup.errors import ArtifactError, StorageError
from fedup.tasks.machine import describe_machine
from fedup.tasks.progress import Progress

pytestmark = pytest.mark.usefixtures("cache")
FEDERATION = """
[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 60
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


def run(cells: list[BenchCell], results: Results, watch: Progress | None = None, **how: Any) -> list[CellEvent]:
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


def test_every_cell_is_measured_once_and_then_only_what_is_missing(read, results):
    cells, watch = read(SMALL + "[methods.logit_mask]\n").cells(only=["class", "clean_client"]), Watch()
    events = run(cells, results, watch, note="a note")
    assert [event.cell for event in events] == cells
    assert [event.outcome for event in events] == ["done"] * 7 + ["not supported"]
    assert [(event.done, event.total) for event in events] == [(n, 8) for n in range(1, 9)]
    assert events[-1].left_s == 0 < events[-3].left_s
    # one federation for all methods, and for both requests, which leave it as it is
    assert watch.trainings.count("digits, seed 0: the federation learns") == 1
    assert watch.trainings.count("Retrain") == 2  # what is measured is done, not taken from a cache
    assert not any("reference" in what for what in watch.trainings)
    assert results.load(cells[7])["not_supported"] is True and "metrics" not in results.load(cells[7])
    figures = {cell.method.name: results.load(cell)["metrics"] for cell in cells[:4]}
    for found in figures.values():  # compared with Retrain
        for name in ("r_a", "test"):
            assert found[f"gap_{name}"] == pytest.approx(found[name] - figures["retrain"][name], abs=1e-12)
    assert figures["retrain"]["tv"] == 0 < figures["fedup"]["tv"]

    before, again = contents(results.folder), Watch()
    assert run(cells, results, again) == []
    assert again.told == [] and contents(results.folder) == before
    expected, gone = all_of(cells, results), [cells[0], cells[5]]
    for cell in gone:
        results.path(cell).unlink()
    before = contents(results.folder)
    assert [(event.cell, event.done) for event in run(cells, results, note="a note")] == list(
        zip(gone, (7, 8), strict=True)
    )
    assert contents(results.folder).items() >= before.items()
    assert all_of(cells, results) == expected
    assert [event.cell for event in run(cells[:1], results, force=True, note="a note")] == cells[:1]
    assert all_of(cells, results) == expected


def test_the_time_left_is_known_from_results_that_are_there_and_each_seed_has_its_federation(read, results):
    first, second = read(TINY).cells(seeds=[0, 1])[::2]
    run([first], results)
    watch = Watch()
    events = run_cells(read(TINY).cells(seeds=[0, 1]), results, progress=watch)
    assert next(events).left_s > 0
    events.close()  # whoever reads the events may stop at any time
    run([second], results, watch)
    assert "digits, seed 1: the federation learns" in watch.trainings
    assert results.load(first)["story"] != results.load(second)["story"]


def test_a_result_says_on_what_from_what_and_when_it_was_measured(read, results, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no git
    monkeypatch.setenv("FEDUP_COMMIT", "abc123")
    telling = own_method(tmp_path, "return Unlearned(task.model, Cost(), about={'notes': ['ρ'], 'rank': 3})")
    cells = read(TINY + telling).cells(seeds=[5])
    run(cells, results, note="two runs side by side")
    for cell in cells:
        found = results.load(cell)
        assert (found["config"], found["hash"], found["seed"]) == (cell.config(), cell.hash, 5)
        assert (found["machine"], found["device"]) == (describe_machine(), "cpu")
        assert found["code"] == {"commit": "abc123", "changed": None}
        assert found["at"].endswith("+00:00") and found["wall_s"] > 0 and found["story"]
        assert found["note"] == "two runs side by side"
        assert found["cost"]["time_s"] is not None and found["seen"]["load"] is not None
        assert found["alone"] in (True, False, None)
    assert results.load(cells[2])["about"] == {"notes": ["ρ"], "rank": 3}


@pytest.mark.parametrize("how", ["its result is there", "its cell is not asked for", "its model is in the cache"])
def test_the_reference_is_the_same_wherever_it_comes_from(read, results, tmp_path, monkeypatch, how):
    retrain, fedup, finetune = read(SMALL).cells(only=["class"])
    run([retrain, fedup, finetune], results)
    expected = all_of([fedup, finetune], results)
    other, watch = Results(tmp_path / "other"), Watch()
    if how == "its result is there":  # and the models in the cache are gone
        other.save(retrain, {name: value for name, value in results.load(retrain).items() if name != "hash"})
    if how != "its model is in the cache":
        monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "another-cache"))
    run([retrain, fedup, finetune] if how == "its result is there" else [fedup, finetune], other, watch)
    assert all_of([fedup, finetune], other) == expected
    trainings = [what for what in watch.trainings if "learns" in what or "etrain" in what]
    learned = ["digits, seed 0: the federation learns", "digits, seed 0: Retrain, the reference"]
    assert trainings == ([] if how == "its model is in the cache" else learned)


def test_interrupted_anywhere_the_same_command_gives_the_same_results(read, tmp_path, monkeypatch):
    cells = read(FEDERATION + "[scenarios.client]\n[methods.finetune]\nrounds = 1\n").cells()
    whole, watch = Results(tmp_path / "whole"), Watch()
    run(cells, whole, watch)
    expected, words = all_of(cells, whole), len(watch.told)
    assert words >= 8
    for stop_at in range(1, words + 1, 2):
        monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / f"cache-{stop_at}"))
        results = Results(tmp_path / f"results-{stop_at}")
        with pytest.raises(KeyboardInterrupt):
            run(cells, results, Watch(stop_at))
        kept = contents(results.folder) if results.folder.exists() else {}
        run(cells, results)
        assert contents(results.folder).items() >= kept.items(), stop_at
        assert all_of(cells, results) == expected, stop_at


def test_a_method_that_fails_is_recorded_the_others_go_on_and_it_is_tried_again(read, results, tmp_path):
    failing = own_method(tmp_path, "return task.kept()")  # no history was kept: an error of the package's own
    cells = read(FEDERATION + "[scenarios.class]\n" + failing + "[methods.none]\n").cells()
    assert [event.outcome for event in run(cells, results)] == ["done", "failed", "done"]
    found = results.load(cells[1])
    assert found["failed"]["error"] == "DataError" and "history" in found["failed"]["message"]
    assert "own.py" in found["failed"]["where"] and 'File "fedup/bench/task.py"' in found["failed"]["where"]
    assert str(Path(fedup.__file__).parents[1]) not in found["failed"]["where"]  # no paths of this machine
    assert {"machine", "device", "code", "at", "config", "hash", "seed"} <= set(found) and "metrics" not in found
    assert [(event.cell, event.outcome) for event in run(cells, results)] == [(cells[1], "failed")]
    own_method(tmp_path, "return Unlearned(task.model, Cost())")  # mended
    mended = load_experiment(tmp_path / "mine.toml").cells()
    assert [(event.cell.method.name, event.outcome) for event in run(mended, results)] == [("own", "done")]
    assert "failed" not in results.load(mended[1])


SPOILS = "import torch\nwith torch.no_grad():\n    next(task.model.parameters()).zero_()\n"
WRONG = {
    "nothing": "return None",
    "no_answer": "return Unlearned(None, Cost())",
    "no_numbers": "import torch\nreturn Unlearned(task.model, Cost(bytes_up=torch.ones(1)))",
    "no_clients": "return Unlearned(task.model, Cost(clients={None, 1}))",
    "no_plain_data": "return Unlearned(task.model, Cost(), about={'set': {1, 2}})",
    "no_way_back": "return Unlearned(task.model, Cost(), restore=lambda: 1 / 0)",
    "many_words": "raise ValueError('a\\nb' * 1000 + '\\udcff')",
    "no_memory": "raise MemoryError",
    "no_end": "def again(): again()\nagain()",
    "spoils": SPOILS + "return Unlearned(task.model, Cost())",
}


def test_whatever_a_method_does_wrong_it_alone_fails_and_the_others_get_the_task_as_it_was(read, results, tmp_path):
    honest = read(TINY).cells()
    run(honest, results)
    expected = timeless(results.load(honest[1]))
    wrong = "".join(own_method(tmp_path, body, name) for name, body in WRONG.items())
    cells, other = (
        read(FEDERATION + "[scenarios.class]\n" + wrong + "[methods.none]\n").cells(),
        Results(tmp_path / "other"),
    )
    events = run(cells, other)
    assert [event.outcome for event in events] == ["done", *["failed"] * len(WRONG), "done"]
    json.dumps([event.result for event in events])  # it can be told
    assert timeless(other.load(cells[-1])) == expected


def test_what_a_group_shares_fails_all_its_cells_but_not_those_of_others(read, results, tmp_path):
    source = tmp_path / "broken_data.py"
    source.write_text(
        "from fedup.tasks.datasets import Images\n"
        "INPUT = Images(1, 28, 28, mean=(0.5,), std=(0.5,))\n"
        "def load():\n    raise OSError('the tape is torn')\n"
    )
    nobody = '[scenarios.nobody]\nuse = "client"\nclient = 99\n'
    cells = read(f'[[federations]]\ndata = "{source}"\nrounds = 1\n{TINY}{nobody}').cells()
    assert [event.outcome for event in run(cells, results)] == [*["failed"] * 4, "done", "done", "failed", "failed"]
    reasons = [results.load(cells[place])["failed"]["message"] for place in (0, 6)]
    assert "torn" in reasons[0] and "no client 99" in reasons[1]
    cells = read(TINY.replace("rounds = 2", "rounds = 2\nlr = 1e30")).cells()  # nothing stays finite
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


class Clock:
    """Stands in for the module `time`: each word of progress takes a tenth of a second."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __call__(self, what: str, done: int, total: int) -> None:
        self.now += 0.1


def test_a_budget_stops_a_run_before_its_end_and_the_next_goes_on_to_the_same_results(
    read, results, tmp_path, monkeypatch
):
    cells = read(TINY.replace("rounds = 2", "rounds = 12")).cells()
    assert len(run(cells, results, budget_s=600)) == 2
    expected = all_of(cells, results)
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "another"))
    other, clock = Results(tmp_path / "other"), Clock()
    with pytest.raises(BudgetSpentError):
        run(cells, other, budget_s=0)
    assert not other.folder.exists()
    with monkeypatch.context() as patch, pytest.raises(BudgetSpentError):
        patch.setattr(runner, "time", clock)
        run(cells, other, clock, budget_s=0.6)
    assert 0.4 < clock.now <= 0.6
    watch = Watch()
    run(cells, other, watch)
    assert 1 < watch.told[1][1] < 8  # it went on
    assert all_of(cells, other) == expected


@pytest.mark.parametrize(("scenario", "ratio"), [("class", 0.1), ("clean_client", 0.8), ("random_samples", 0.5)])
def test_the_papers_preset_is_what_the_papers_settings_are_one_by_one(read, results, scenario, ratio):
    paper = '[methods.paper]\nuse = "fedup"\nsteps = 20\npreset = "paper"\nratio = 0.33\nguard = true\n'
    by_hand = (
        f'[methods.by_hand]\nuse = "fedup"\nsteps = 20\nratio = {ratio}\nsigma = 0.001\ncache = false\n'
        'class_policy = "remap"\nguard = false\ngentle = false\nfilter = "bottleneck"\n'
    )
    ours = '[methods.fedup]\nsteps = 20\nfilter = "bottleneck"\n'
    cells = read(f"{FEDERATION}[scenarios.{scenario}]\n{paper}{by_hand}{ours}").cells()
    run(cells, results)
    found = {cell.method.name: timeless(results.load(cell)) for cell in cells}
    for part in ("metrics", "about"):
        assert found["paper"][part] == found["by_hand"][part]
    assert found["paper"]["metrics"] != found["fedup"]["metrics"]


@pytest.mark.parametrize(("kind", "erased"), [("bottleneck", False), ("both", True)])
def test_the_result_of_fedup_says_where_samples_were_erased(read, results, kind, erased):
    text = f'{FEDERATION}[scenarios.sample]\nshare = 0.5\n[methods.fedup]\nsteps = 20\nfilter = "{kind}"\n'
    cell = read(text.replace("rows = 60", "rows = 200")).cells()[1]  # fewer rows have no eraser
    run([cell], results)
    about = results.load(cell)["about"]
    assert set(about) == {"did", "erasure", "expected_loss", "notes", "privacy"}
    assert bool(about["erasure"]) is erased
