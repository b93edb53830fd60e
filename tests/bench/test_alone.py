"""Whether a device was alone: by what can be seen of others, never by what this process does itself."""

import subprocess
import sys
import time

import pytest
import torch

from fedup.bench import alone
from fedup.bench.alone import Alone, AloneCheck, look_once

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUIET = {"load": 0.1, "processes": 1, "utilization": 0, "foreign_bytes": 600 * 2**20}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(alone, "_cores", lambda: 16)


def judged(device: torch.device, cores: float | None = 0.0, **seen: object) -> Alone:
    return alone._judge(device, [QUIET, {**QUIET, **seen}], cores)


def test_a_quiet_device_is_alone_and_what_was_seen_is_kept():
    found = judged(GPU)
    assert found.alone is True
    assert found.others == ""
    assert found.to_json()["seen"] | {"others": []} == {
        "load": 0.1,
        "processes": 1,
        "utilization": 0,
        "foreign_bytes": 600 * 2**20,
        "cores": 16,
        "others_cores": 0.0,
        "others": [],
    }


OTHERS = {
    "a second process": ({"processes": 2}, "2 processes on the GPU"),
    "a GPU that works while this process waits": ({"utilization": 60}, "used at 60 %"),
    "memory that is not its own": ({"foreign_bytes": 20 * 2**30}, "somebody else's"),
}


@pytest.mark.parametrize(("seen", "words"), OTHERS.values(), ids=OTHERS)
def test_each_sign_of_others_is_enough(seen, words):
    found = judged(GPU, **seen)
    assert found.alone is False
    assert words in found.others


def test_a_container_that_hides_processes_leaves_the_other_signs():
    assert judged(GPU, processes=None, utilization=None).alone is True
    blind = [{**QUIET, "processes": None, "utilization": None, "foreign_bytes": size} for size in (0, 9 * 2**30)]
    assert alone._judge(GPU, blind, 0.0).alone is False


def test_where_nothing_can_be_seen_nothing_is_claimed():
    assert alone._judge(CPU, [{"load": None}] * 2, None).alone is None
    assert alone._judge(GPU, [{"load": 0.1}] * 2, 0.0).alone is None


@pytest.mark.parametrize(("device", "cores", "expected"), [(CPU, 2, True), (CPU, 3, False), (GPU, 7, True)])
def test_busy_cores_of_others_disturb_a_cpu_before_they_disturb_a_gpu(device, cores, expected):
    assert judged(device, cores).alone is expected


def test_what_this_process_does_itself_is_not_others(monkeypatch):
    first = alone._Cpu(at=0.0, own_s=10.0, busy_s=100.0)
    assert alone._others_cores(first, alone._Cpu(at=2.0, own_s=14.0, busy_s=104.0)) == 0.0
    assert alone._others_cores(first, alone._Cpu(at=2.0, own_s=11.0, busy_s=104.0)) == 1.5
    assert alone._others_cores(first, alone._Cpu(at=0.01, own_s=10.0, busy_s=100.1)) is None  # too short to be counted


def test_without_the_kernels_counts_the_load_average_less_the_own_threads_stands_in(monkeypatch):
    blind = alone._Cpu(at=0.0, own_s=0.0, busy_s=None)
    monkeypatch.setattr(alone.os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    monkeypatch.setattr(alone.torch, "get_num_threads", lambda: 2)
    assert alone._others_cores(blind, blind) == 3.0


def test_a_process_that_works_meanwhile_is_seen(monkeypatch):
    monkeypatch.setattr(alone, "_cores", lambda: 1)  # so that one core of others is all there is
    check = AloneCheck("cpu")
    spin = "import time\nend = time.perf_counter() + 5\nwhile time.perf_counter() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        time.sleep(1.5)
        found = check.finish()
    finally:
        other.kill()
        other.wait()
    assert found.alone is False
    assert found.seen["others_cores"] > 0.15


def test_a_look_takes_long_enough_to_see_something():
    assert look_once("cpu").seen["others_cores"] >= 0


def test_a_missing_tool_of_the_driver_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(alone.torch.cuda, "get_device_properties", lambda device: object())
    assert alone._smi(GPU, "--query-compute-apps=pid") is None


@pytest.mark.parametrize(("answers", "expected"), [([0], 0), ([90, 3], 3), ([90, 80, 85], 80), ([None], None)])
def test_own_work_that_the_driver_still_counts_is_waited_for(monkeypatch, answers, expected):
    told = iter(answers)
    monkeypatch.setattr(alone, "_smi", lambda device, query: None if (value := next(told)) is None else [str(value)])
    monkeypatch.setattr(alone.time, "sleep", lambda seconds: None)
    assert alone._utilization(GPU) == expected
