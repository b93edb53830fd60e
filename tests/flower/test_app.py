"""The example app, for real: Flower's simulation engine, SuperLink and SuperNodes as processes, and these with TLS."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from tests.cli._in_process import ok as fedup_command
from tests.flower import _processes

import fedup
from fedup import MomentConfig
from fedup.flower import RunServer

APP = Path(__file__).parents[2] / "examples" / "flower-app"
CONFIG = 'data="digits" rounds=1 epochs=4'  # the least that learns all there is to forget
LIMIT_S = 540

pytestmark = pytest.mark.slow


class AppRun:
    """One call of run.py, whose processes are known by a mark."""

    def __init__(self, way: str, out: Path, config: str = CONFIG) -> None:
        self.mark, self._log = f"{_processes.MARK}={uuid.uuid4()}", out.with_suffix(".log")
        name, value = self.mark.split("=")
        command = [sys.executable, str(APP / "run.py"), way, "--out", str(out), "-c", config]
        with self._log.open("w") as log:
            environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def code(self, limit_s: float = LIMIT_S) -> int:
        """How it ended; it is interrupted rather than killed, so that it stops what it started."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
            raise

    def said(self) -> str:
        return self._log.read_text()

    def running(self) -> list[str]:
        return _processes.running(self.mark)

    def left(self) -> list[str]:
        """What still runs a little later."""
        return _processes.left(self.mark)


@pytest.mark.parametrize("way", ["simulation", "secure"])
def test_the_app_learns_forgets_and_remembers_over_flower_as_in_one_process(way, tmp_path, monkeypatch):
    run = AppRun(way, tmp_path / "out")
    assert run.code() == 0, run.said()[-5000:]
    assert run.left() == []
    result = json.loads((tmp_path / "out" / "result.json").read_text())

    assert [request["kind"] for request in result["requests"]] == ["client", "class", "sample"]
    for request in result["requests"]:
        assert request["after"]["forget"] < request["before"]["forget"] - 0.03, request
        assert request["after"]["retain"] > request["before"]["retain"] - 0.15, request
        assert request["restored"] is True, request
    client, of_class, sample = result["requests"]
    for counted in (client, of_class):  # answered at the server; all nodes count right answers
        assert counted["clients_contacted"] == [] and counted["messages"] % 4 == 0 < counted["messages"]
        assert counted["bytes_up"] / counted["messages"] < 2_000 < result["collection"]["bytes_up"] / 4
    assert sorted(sample["clients_contacted"]) == [0, 1, 2, 3]  # one clusters again, all are compared with
    assert sample["messages"] > 0 and sample["bytes_up"] > 0

    monkeypatch.syspath_prepend(str(APP))
    from flowerapp import task

    digits = task.load({"data": "digits", "rows": 10_000}, nodes=4)
    folder = tmp_path / "out" / result["run_folder"]
    server = RunServer(folder, task.make_model)
    in_process = fedup.collect(server.plugged().base, digits.federation, statistics=MomentConfig(by_class="always"))
    assert result["collection"]["clients"] == [0, 1, 2, 3]
    assert result["collection"]["sha256"] == task.digest(in_process)

    assert all(check.ok is not False for check in server.verify(task.EXAMPLE))
    assert "The folder is sound" in fedup_command("verify", "--run", folder).out
    for request in result["requests"]:
        fedup_command("evidence", request["id"], "--run", folder)


@pytest.mark.parametrize(("way", "how"), [("deployment", signal.SIGTERM), ("simulation", signal.SIGINT)])
def test_an_interrupted_run_leaves_no_process_behind(way, how, tmp_path):
    run = AppRun(way, tmp_path / "out")
    until = time.monotonic() + 120

    def at_work():  # Ray starts its workers while the round begins
        return "[ROUND 1" in run.said() and len(run.running()) >= 6

    while not at_work() and run.process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    assert len(run.running()) >= 6, run.said()  # the link, its nodes or Ray's, and what runs apps for them
    run.process.send_signal(how)
    assert run.code(60) == 128 + how
    assert run.left() == []


def test_a_failed_run_is_told_by_the_exit_code(tmp_path):
    run = AppRun("simulation", tmp_path / "out", 'data="nothing of the sort"')
    assert run.code() == 1, run.said()[-5000:]
    assert "The run failed" in run.said()
    assert run.left() == []
