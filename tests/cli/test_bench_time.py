"""`fedup bench time` as a person meets it: what will be timed, a busy device, and what to do next."""

from pathlib import Path

import pytest
from tests.cli._in_process import Ran, contents, fedup

from fedup.bench import alone, timing
from fedup.bench.alone import Alone

EXPERIMENT = """
[[federations]]
data = "digits"
rounds = 2
clients = 3
rows = 90
batch_size = 32
[scenarios.class]
[methods.retrain]
[methods.none]
[methods.logit_mask]
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.toml").write_text(EXPERIMENT)

    def bench(verb: str, *arguments: object) -> Ran:
        where = ["--results", tmp_path / "results", "--device", "cpu"]
        return fedup("bench", verb, tmp_path / "mine.toml", *where, *arguments)

    return bench


@pytest.fixture
def state(monkeypatch):
    """Whether the device is alone, as everybody sees it."""
    found = {"alone": True}

    class Check:
        def __init__(self, device: str) -> None:
            pass

        def finish(self, *, idle: bool = False) -> Alone:
            return Alone(found["alone"], {"others": [] if found["alone"] else ["2 processes on the GPU"]})

    monkeypatch.setattr(timing, "AloneCheck", Check)
    monkeypatch.setattr(alone, "look_once", lambda device: Check(device).finish())
    return found


def times(tmp_path: Path) -> list[str]:
    return sorted(path.name[:-19] for path in (tmp_path / "results").rglob("*.time.json"))


def test_cells_are_named_before_they_are_timed_and_a_second_call_has_nothing_to_do(bench, state, tmp_path):
    assert bench("run").code == 0
    before = contents(tmp_path / "results")
    ran = bench("time")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[:3] == [
        f"digits-lenet5, class, {name}, seed 0" for name in ("retrain", "none", "logit_mask")
    ]
    assert "3 cells to time on cpu, each once to warm up and 3 times." in ran.out
    assert "3 of 3 cells have clean times now, 0 failed." in ran.out
    assert "[3/3] digits-lenet5, class, logit_mask, seed 0: " in ran.err
    assert times(tmp_path) == ["logit_mask-seed0", "none-seed0", "retrain-seed0"]
    assert contents(tmp_path / "results").items() >= before.items()
    again = bench("time")
    assert again.out.startswith("0 cells to time on cpu")
    assert "3 have clean times" in again.out
    assert "3 cells to time" in bench("time", "--force", "--dry-run").out


def test_a_device_that_is_not_idle_is_refused_and_nothing_is_timed_that_has_no_figures(bench, state, tmp_path):
    ran = bench("time")
    assert ran.code == 0
    assert "0 cells to time" in ran.out and "3 have no figures and are left out." in ran.out
    bench("run")
    assert "3 cells to time" in bench("time", "--dry-run").out
    assert bench("time", "--repeats", "2").code == 2  # fewer than three are no measurement
    ran = bench("time", "--budget-minutes", "0")
    assert ran.code == 0 and "the same command goes on from here" in ran.err
    state["alone"] = False
    ran = bench("time")
    assert ran.code == 1
    assert "The device is not idle (2 processes on the GPU)" in ran.told and "--shared" in ran.told
    assert times(tmp_path) == []
    marked = bench("time", "--shared", "--only", "none")
    assert marked.code == 0 and ", shared" in marked.err
    assert "0 of 1 cells have clean times now" in marked.out
