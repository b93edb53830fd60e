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


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results" / "mine")


def test_what_is_saved_is_loaded_and_says_what_it_is_of(results, cells):
    results.save(cells[0], FOUND)
    found = results.load(cells[0])
    assert {name: found[name] for name in FOUND} == FOUND
    assert found["format"] == FORMAT
    assert found["hash"] == cells[0].hash
    assert found["config"] == cells[0].config()
    assert found["seed"] == 0
    assert results.is_done(cells[0])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(plain)
def test_any_plain_data_comes_back_as_it_was(tmp_path_factory, cells, value):
    results = Results(tmp_path_factory.getbasetemp() / "any")
    results.save(cells[0], {"metrics": value})
    assert results.load(cells[0])["metrics"] == value


def test_each_cell_has_a_file_of_its_own_below_the_folder(results, cells):
    paths = [results.path(cell) for cell in cells]
    assert len(set(paths)) == len(cells)
    assert all(path.is_relative_to(results.folder) for path in paths)
    for place, cell in enumerate(cells):
        results.save(cell, {"metrics": place})
    assert [results.load(cell)["metrics"] for cell in cells] == list(range(len(cells)))


def test_where_nothing_is_there_is_no_result(results, cells):
    assert [results.load(cell) for cell in cells] == [None] * len(cells)
    assert not any(map(results.is_done, cells))
    assert not results.folder.exists()  # looking makes nothing


def test_a_changed_setting_is_another_file_and_the_old_one_stays(results, cells, tmp_path):
    (tmp_path / "mine.toml").write_text(EXPERIMENT.replace("rank = 4", "rank = 5"))
    changed = load_experiment(tmp_path / "mine.toml").cells()[2]
    small = next(cell for cell in cells if cell.method.name == "small")
    results.save(small, FOUND)
    before = contents(results.folder)
    assert results.load(changed) is None
    results.save(changed, {"metrics": 2})
    assert contents(results.folder).items() > before.items()


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


def test_a_failure_is_loaded_and_is_not_done(results, cells):
    results.save(cells[0], {"failed": {"error": "RuntimeError", "message": "no"}})
    assert results.load(cells[0])["failed"]["message"] == "no"
    assert not results.is_done(cells[0])
    results.save(cells[0], FOUND)
    assert results.is_done(cells[0])


def test_a_method_that_does_not_support_a_request_is_done(results, cells):
    results.save(cells[0], {"not_supported": True})
    assert results.is_done(cells[0])


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


DAMAGED = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[:-20],
    "cut off early": lambda data: data[:1],
    "zeros": lambda data: bytes(len(data)),
    "no text": lambda data: b"\xff\xfe" + data,
    "not JSON": lambda data: data.replace(b'"hash"', b"hash"),
}


@pytest.mark.parametrize("how", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_result_is_named_and_neither_counted_nor_changed(results, cells, how):
    for cell in cells:
        results.save(cell, FOUND)
    path = results.path(cells[1])
    damage(path, how)
    before = contents(results.folder)
    for look in (results.load, results.is_done):
        with pytest.raises(ArtifactError, match=rf"{path.name} is not a result.*remove it, and its cell"):
            look(cells[1])
    assert results.is_done(cells[0])
    assert contents(results.folder) == before


@pytest.mark.parametrize(
    "found",
    [{"format": FORMAT + 1}, {"format": 0}, {"format": "1"}, {"format": None}, [1], 3, "text", None, True, {}],
)
def test_a_result_of_another_format_is_refused_with_what_to_do(results, cells, found):
    results.save(cells[0], FOUND)
    path = results.path(cells[0])
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **found} if found and isinstance(found, dict) else found)
    )
    with pytest.raises(ArtifactError, match=rf"format .*reads and writes {FORMAT}.*--results"):
        results.load(cells[0])


def test_a_result_under_another_cells_name_is_refused(results, cells):
    for cell in cells[:2]:
        results.save(cell, FOUND)
    results.path(cells[0]).replace(results.path(cells[1]))
    with pytest.raises(ArtifactError, match="of another configuration: it was edited or renamed"):
        results.load(cells[1])


@pytest.mark.parametrize("edited", ["0" * 64, "", None, 3])
def test_an_edited_hash_is_refused(results, cells, edited):
    results.save(cells[0], FOUND)
    path = results.path(cells[0])
    path.write_text(json.dumps({**json.loads(path.read_text()), "hash": edited}))
    with pytest.raises(ArtifactError, match="of another configuration"):
        results.is_done(cells[0])


def test_an_edited_configuration_is_refused(results, cells):
    # The hash is of the configuration: a file whose two do not agree was edited.
    results.save(cells[0], FOUND)
    path = results.path(cells[0])
    content = json.loads(path.read_text())
    content["config"]["federation"]["rounds"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="of another configuration"):
        results.load(cells[0])


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


@pytest.mark.parametrize("limit_bytes", [0, 1, 100, 1000])
def test_a_disk_that_takes_no_more_leaves_the_finished_results_byte_for_byte(results, cells, limit_bytes):
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_said_as_such(results, cells, monkeypatch):
    results.save(cells[0], FOUND)
    before = contents(results.folder)
    # The file to be written is a device that is always full, as the kernel has one.
    path = results.path(cells[0])
    path.with_name(f".{path.name}.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"No space left on device\. Free some space"):
        results.save(cells[0], {"metrics": 2})
    assert contents(results.folder) == before


def test_a_folder_that_is_a_file_is_said_and_stays(tmp_path, cells):
    place = tmp_path / "results"
    place.write_text("mine")
    with pytest.raises(StorageError, match="Could not write"):
        Results(place).save(cells[0], FOUND)
    assert place.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(results, cells):
    results.save(cells[0], FOUND)
    folder = results.path(cells[0]).parent
    folder.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="permission"):
            results.save(cells[0], {"metrics": 2})
        assert results.load(cells[0])["metrics"] == FOUND["metrics"]
    finally:
        folder.chmod(0o700)


def test_what_is_no_plain_data_leaves_the_old_result(results, cells):
    results.save(cells[0], FOUND)
    before = contents(results.folder)
    with pytest.raises(TypeError):
        results.save(cells[0], {"metrics": {1, 2}})
    assert contents(results.folder) == before
