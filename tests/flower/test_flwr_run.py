"""The example as a newcomer runs it, `flwr run .`, and requests for it from a terminal; nothing is downloaded."""

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli._in_process import fedup, ok
from tests.flower import _processes

APP = Path(__file__).parents[2] / "examples" / "flower-app"
LIMIT_S, TRIES = 300, 3


@pytest.fixture
def flwr_run(tmp_path, monkeypatch):
    """`flwr run .` in the app's folder, with a home and ports of its own; what it started ends with the test."""
    monkeypatch.syspath_prepend(str(APP))
    from run import QUIET, Processes, free_port

    name, value = _processes.MARK, str(uuid.uuid4())
    home, ports = tmp_path / "home", ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
    environment = {
        **QUIET,
        **os.environ,
        name: value,
        "FLWR_HOME": str(home),
        "UV_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {port: str(free_port()) for port in ports}
    environment.pop("FEDUP_DATA", None)  # digits are built in

    def call(config: str) -> str:
        command = ["flwr", "run", ".", "--stream", "-c", config]
        for _ in range(TRIES):  # Flower gives its own SuperLink 15 s to start
            done = subprocess.run(command, cwd=APP, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            said = done.stdout + done.stderr
            if "Failed to start local SuperLink within" not in said:
                return said
        pytest.fail(said)

    yield call
    for number in Processes(home, tmp_path, 1.0)._left():
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert _processes.left(f"{name}={value}") == []


@pytest.mark.slow
def test_the_example_runs_as_typed_and_its_folder_takes_requests_from_a_terminal(flwr_run, tmp_path):
    folder = tmp_path / "run"
    config = f'folder="{folder}" rounds=1'
    said = flwr_run(config)
    assert "served: []" in said, said[-5000:]
    ok("unlearn", "--class", 4, "--reference", "T-1", "--force", "--run", folder)  # its model was found by itself
    queued = fedup("unlearn", "--samples", f"0:{','.join(map(str, rows_of_client_0()))}", "--force", "--run", folder)
    assert queued.code == 3, queued
    ok("release", "--all", "--run", folder)  # simulated nodes have new numbers in each run
    said = flwr_run(config)
    assert 'served: [["R2", "answered"]]' in said, said[-5000:]
    assert ok("status", "--run", folder, "--json").json["in_force"] == ["R1", "R2"]
    assert "The folder is sound." in ok("verify", "--run", folder).out


def rows_of_client_0() -> list[int]:
    from flowerapp import task

    digits = task.load({"data": "digits", "rows": 10_000}, nodes=2)
    return digits.federation.client(0).train[:30].tolist()
