"""Whether a device was alone: by what can be seen of others, never by what this process does itself."""

import subprocess
import sys

import pytest
import torch

from fedup.bench import alone
from fedup.bench.alone import Alone, AloneCheck

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QUIET = {"load": 0.1, "processes": 1, "utilization": 0, "foreign_bytes": 600 * 2**20}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(alone, "_cores", lambda: 16)


def judged(device: torch.device, cores: float | None = 0.0, **seen: object) -> Alone:
    return alone._judge(device, [QUIET, {**QUIET, **seen}], cores)


def test_a_quiet_device_is_alone_and_what_was_seen_is_kept():
    found = judged(GPU)
    assert (found.alone, found.others) == (True, "")
    assert found.to_json()["seen"] == QUIET | {"cores": 16, "others_cores": 0.0, "others": []}


def test_each_sign_of_others_is_enough_and_where_nothing_can_be_seen_nothing_is_claimed():
    signs = {"processes": (2, "2 processes on the GPU"), "utilization": (60, "used at 60 %")}
    for name, (value, words) in {**signs, "foreign_bytes": (20 * 2**30, "somebody else's")}.items():
        found = judged(GPU, **{name: value})
        assert found.alone is False and words in found.others
    assert alone._judge(CPU, [{"load": None}] * 2, None).alone is None
    assert alone._judge(GPU, [{"load": 0.1}] * 2, 0.0).alone is None


def test_a_container_that_hides_processes_leaves_the_other_signs():
    assert judged(GPU, processes=None, utilization=None).alone is True
    blind = [{**QUIET, "processes": None, "utilization": None, "foreign_bytes": size} for size in (0, 9 * 2**30)]
    assert alone._judge(GPU, blind, 0.0).alone is False


@pytest.mark.parametrize(("device", "cores", "expected"), [(CPU, 2, True), (CPU, 3, False), (GPU, 7, True)])
def test_busy_cores_of_others_disturb_a_cpu_before_they_disturb_a_gpu(device, cores, expected):
    assert judged(device, cores).alone is expected


def test_what_this_process_does_itself_is_not_others(monkeypatch):
    first = alone._Cpu(at=0.0, own_s=10.0, busy_s=100.0)
    assert alone._others_cores(first, alone._Cpu(at=2.0, own_s=14.0, busy_s=104.0)) == 0.0
    assert alone._others_cores(first, alone._Cpu(at=2.0, own_s=11.0, busy_s=104.0)) == 1.5
    assert alone._others_cores(first, alone._Cpu(at=0.01, own_s=10.0, busy_s=100.1)) is None  # too short to be counted
    blind = alone._Cpu(at=0.0, own_s=0.0, busy_s=None)  # the kernel counts nothing: the load average stands in
    monkeypatch.setattr(alone.os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    monkeypatch.setattr(alone.torch, "get_num_threads", lambda: 2)
    assert alone._others_cores(blind, blind) == 3.0


def test_a_process_that_works_meanwhile_is_seen(monkeypatch):
    monkeypatch.setattr(alone, "_cores", lambda: 1)  # so that one core of others is all there is
    check = AloneCheck("cpu")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = check.finish(idle=True)  # waits long enough to see something
    finally:
        other.kill()
        other.wait()
    assert found.alone is False
    assert found.seen["others_cores"] > 0.15


@pytest.mark.parametrize(("answers", "expected"), [([0], 0), ([90, 3], 3), ([90, 80, 85], 80), ([None], None)])
def test_own_work_that_the_driver_still_counts_is_waited_for(monkeypatch, answers, expected):
    replies = iter(answers)
    monkeypatch.setattr(alone, "_smi", lambda device, query: None if (value := next(replies)) is None else [str(value)])
    monkeypatch.setattr(alone.time, "sleep", lambda seconds: None)
    assert alone._utilization(GPU) == expected


def test_a_missing_tool_of_the_driver_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(alone.torch.cuda, "get_device_properties", lambda device: object())
    assert alone._smi(GPU, "--query-compute-apps=pid") is None
