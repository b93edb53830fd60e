"""A result is on disk whole or not at all, and counts only for the configuration that it says it is of."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli._in_process import contents

from fedup.bench.experiment import BenchCell, load_experiment
from fedup.bench.results import FORMAT, Results
from fedup.errors import ArtifactError, StorageError

FOUND = {"metrics": {"r_a": 0.5, "f_a": None}, "cost": {"clients": [1, 2]}, "wall_s": 1.5}
EXPERIMENT = """
[[federations]]
data = "digits"
[scenarios.class]
[scenarios.client]
[methods.retrain]
[methods.fedup]
[methods.small]
use = "fedup"
rank = 4
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> list[BenchCell]:
    path = tmp_path_factory.mktemp("experiment") / "mine.toml"
    path.write_text(EXPERIMENT)
    return load_experiment(path).cells(seeds=[0, 1])


def test_each_cell_has_a_file_of_its_own_that_says_what_it_is_of(results, cells):
    assert not any(map(results.is_done, cells)) and [results.load(cell) for cell in cells] == [None] * len(cells)
    assert not results.folder.exists()  # looking makes nothing
    for place, cell in enumerate(cells):
        results.save(cell, {"metrics": place})
    for place, cell in enumerate(cells):
        found, path = results.load(cell), results.path(cell)
        assert path.is_relative_to(results.folder) and results.is_done(cell)
        assert (found["metrics"], found["format"], found["hash"]) == (place, FORMAT, cell.hash)
        assert (found["config"], found["seed"]) == (cell.config(), cell.group.recipe.seed)
    assert results.seeds() == [0, 1]
    before = contents(results.folder)
    with pytest.raises(TypeError):
        results.save(cells[0], {"metrics": {1, 2}})  # no plain data
    assert contents(results.folder) == before


ROOT = Path(__file__).parents[2] / "benchmarks"


def test_the_results_in_the_repository_count_as_done_whatever_settings_were_added_since():
    kept, cells = Results(ROOT / "results" / "main"), load_experiment(ROOT / "experiments" / "main.toml").cells()
    done = [cell for cell in cells if kept.is_done(cell)]
    files, times = set(kept.folder.rglob("*.json")), set(kept.folder.rglob("*.time.json"))
    assert len(done) > 100
    assert files - times == {kept.path(cell) for cell in done}
    assert times <= {kept.timing_path(cell) for cell in done}
    for cell in done[:5]:
        assert kept.load(cell)["config"] == cell.config()


def test_a_failure_is_loaded_and_is_not_done_and_what_is_not_supported_is(results, cells):
    results.save(cells[0], {"failed": {"error": "RuntimeError", "message": "no"}})
    assert results.load(cells[0])["failed"]["message"] == "no"
    assert not results.is_done(cells[0])
    for found in (FOUND, {"not_supported": True}):
        results.save(cells[0], found)
        assert results.is_done(cells[0])


def changed(content: dict, **changes) -> bytes:
    return json.dumps(content | changes).encode()


DAMAGES = {
    "is not a result.*remove it, and its cell": [
        *(lambda data, n=n: data[:n] for n in (0, 1, -20)),
        *(
            lambda data: bytes(len(data)),
            lambda data: b"\xff\xfe" + data,
            lambda data: data.replace(b'"hash"', b"hash"),
        ),
    ],
    f"format .*reads and writes {FORMAT}.*--results": [
        *(lambda data, f=f: changed(json.loads(data), format=f) for f in (FORMAT + 1, "1", None)),
        *(lambda data, odd=odd: json.dumps(odd).encode() for odd in ([1], 3, None, {})),
    ],
    "of another configuration: it was edited or renamed": [
        *(lambda data, h=h: changed(json.loads(data), hash=h) for h in ("0" * 64, None)),
        lambda data: changed(json.loads(data), config={"federation": {"rounds": 99}}),
        None,  # a result under another cell's name
    ],
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(told, damage) for told, damages in DAMAGES.items() for damage in damages]))
def test_a_damaged_result_is_named_and_neither_counted_nor_changed(tmp_path_factory, cells, case):
    told, damage = case
    results = Results(tmp_path_factory.mktemp("damaged"))
    for cell in cells[:3]:
        results.save(cell, FOUND)
    path = results.path(cells[1])
    path.write_bytes(damage(path.read_bytes()) if damage else results.path(cells[2]).read_bytes())
    before = contents(results.folder)
    for look in (results.load, results.is_done):
        with pytest.raises(ArtifactError, match=rf"{path.name} .*{told}"):
            look(cells[1])
    assert results.is_done(cells[0])
    assert contents(results.folder) == before


# --- a disk that takes nothing


def in_a_child(work: Callable[[], None]) -> None:
    """Do the work in a child, whose limits go with it; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("limit_bytes", [0, 1000])
def test_a_disk_that_takes_no_more_leaves_the_finished_results_byte_for_byte(results, cells, limit_bytes, tmp_path):
    for cell in cells[:3]:
        results.save(cell, FOUND)
    before = contents(results.folder)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        for cell in (cells[0], cells[3]):  # over one that is there, and a new one
            with pytest.raises(StorageError, match=r"Could not write .*what was there before is untouched"):
                results.save(cell, {"metrics": "x" * 2000})

    in_a_child(work)
    assert contents(results.folder) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="Could not write"):
        Results(tmp_path / "file").save(cells[0], FOUND)
    assert (tmp_path / "file").read_text() == "mine"
