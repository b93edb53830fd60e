"""The operator's walk of docs/flower.md, command by command, on a SuperLink and four SuperNodes with keys and rules."""

import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from tests.cli._in_process import fedup
from tests.flower import _processes
from tests.flower._deployment import wait_until
from tests.flower._grid import FIRST, LocalGrid

from fedup.run.folder import Run

ROOT = Path(__file__).parents[2]
APP, PAGE = ROOT / "examples" / "flower-app", ROOT / "docs" / "flower.md"
LIMIT_S = 1500  # for each message a node starts a process, on two cores that others use, too
NODES = 4
QUEUED = 3  # exit status


def walk() -> list[str]:
    """The commands of the page, and the sentences that say what hospitals do meanwhile."""
    text = PAGE.read_text(encoding="utf-8").partition("### An operator's walk")[2].partition("\n## ")[0]
    return re.findall(r"(^\$ .*|Hospital \d (?:is offline|is back|takes the rows out))", text, re.MULTILINE)


class InOneProcess:
    """The example's own apps on a grid without a wire: what takes a deployment minutes takes seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(APP))
        self.app, self.run = folder / "app", folder / "hospitals"
        self.app.mkdir()
        monkeypatch.chdir(self.app)
        client_app = importlib.import_module("flowerapp.client_app").app
        self._config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        self._grid = LocalGrid(dict.fromkeys(range(FIRST, FIRST + NODES), client_app))
        for node, context in self._grid.contexts.items():
            rules = folder / f"node{node}-rules.toml"
            shutil.copy(APP / "node-rules.toml", rules)
            context.node_config = {"partition-id": node - FIRST, "fedup-rules": str(rules)}
        self._away: dict[int, ClientApp] = {}
        self._served: dict[str, Any] = {}

    def stop(self, node: int) -> None:
        self._away[node] = self._grid.apps.pop(FIRST + node)

    def start(self, node: int) -> None:
        self._grid.apps[FIRST + node] = self._away.pop(node)

    def take_out(self, node: int) -> None:
        self._grid.contexts[FIRST + node].node_config["taken-out"] = str(self.app / "rows.txt")

    def type(self, command: str) -> str:
        """As it stands on the page; a server app runs to its end, and its nodes have no keys."""
        words = shlex.split(command.replace("$(cat rows.txt)", (self.app / "rows.txt").read_text()), comments=True)
        words = [word.replace("/srv/hospitals", str(self.run)) for word in words]
        if words[:2] == ["flwr", "stop"]:
            self._served = {}
            return ""
        if words[0] == "flwr":
            given = tomllib.loads("\n".join(words[-1].split()))
            quick = {"authenticated": False, "serve": 0, "timeout": 0.1, "rounds": 2}
            self._serve({**self._config, **given, **quick, "typed": " ".join(given)})
            return ""
        ran = fedup(*words[1:])
        assert ran.code == exit_of(command), f"{command}\n{ran.out}{ran.err}"
        if ran.code == QUEUED and self._served:
            self._serve(self._served)  # as a server app does that still runs
        return ran.out

    def _serve(self, config: dict[str, Any]) -> None:
        self._served = config if "serve" in config["typed"] else {}
        for context in self._grid.contexts.values():
            context.run_config = config
        server_app = importlib.import_module("flowerapp.server_app")
        server_app.main(self._grid, Context(1, 0, {}, RecordDict(), config))


def exit_of(command: str) -> int:
    """The exit status that the page names."""
    return int(found[1]) if (found := re.search(r"# \(exit (\d)\)$", command)) else 0


class Hospitals:
    """SuperLink and SuperNodes, of which each can be stopped and started again; commands run in a copy of the app."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mark = f"{_processes.MARK}={uuid.uuid4()}"
        monkeypatch.setenv(*self.mark.split("="))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.syspath_prepend(str(APP))
        self._runner = importlib.import_module("run")
        self.app, self.run, home = folder / "app", folder / "hospitals", folder / "home"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        home.mkdir()
        self._commands: dict[str, tuple[str, ...]] = {}
        self._last = ""  # number of the last server app
        self._processes = self._runner.Processes(home, folder, LIMIT_S)
        start = self._processes.start

        def noting(name: str, *command: str) -> None:
            self._commands[name] = command
            start(name, *command)

        self._processes.start = noting
        self._runner.serve(self._processes, "secure", home, NODES)
        config = home / "config.toml"
        config.write_text(config.read_text().replace("superlink.fedup", "superlink.hospitals"))

    def stop(self, node: int) -> None:
        own = next(own for own in self._processes._running if own[0] == f"supernode{node}")
        own[1].terminate()
        own[1].wait(60)
        self._processes._running.remove(own)

    def start(self, node: int) -> None:
        self._processes.start(f"supernode{node}", *self._commands[f"supernode{node}"])

    def take_out(self, node: int) -> None:
        """Its operator says which rows these are, and starts it again."""
        self.stop(node)
        words = [*self._commands[f"supernode{node}"]]
        words[words.index("--node-config") + 1] += f' taken-out="{self.app / "rows.txt"}"'
        self._commands[f"supernode{node}"] = tuple(words)
        self.start(node)

    def type(self, command: str) -> str:
        """As it stands on the page, but for the folder."""
        words = command.replace("/srv/hospitals", str(self.run))
        environment = {**self._processes._environment, "COLUMNS": "100", "RUN": self._last}
        done = subprocess.run(
            ["bash", "-c", words], cwd=self.app, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == exit_of(command), f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        if started := re.search(r"[Rr]un (\d{5,})", done.stdout + done.stderr):
            self._last = started[1]
        return done.stdout

    def close(self) -> list[str]:
        self._processes.stop()
        return _processes.left(self.mark)


@pytest.fixture
def hospitals(tmp_path, monkeypatch, request):
    monkeypatch.delenv("FEDUP_DATA", raising=False)
    if request.param == "one process":
        yield InOneProcess(tmp_path, monkeypatch)
        return
    made = Hospitals(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        left = made.close()
    assert left == []


def write_rows(path: Path) -> None:
    """The rows of hospital 1 with the backdoor."""
    from flowerapp import task

    backdoor = task.load({"data": "digits", "rows": 10_000}, NODES).requests[2]
    path.write_text(",".join(map(str, sorted(backdoor.sample_ids[1]))))


@pytest.mark.slow
@pytest.mark.parametrize("hospitals", ["one process", "deployment"], indirect=True)
def test_every_command_of_the_walk_ends_as_the_page_says(hospitals):
    write_rows(hospitals.app / "rows.txt")
    steps, said, serving, asked = walk(), "", False, ()
    assert sum(step.startswith("$ fedup") for step in steps) > 8
    for step in steps:
        if not step.startswith("$ "):
            number, do = int(step.split()[1]), {"offline": hospitals.stop, "back": hospitals.start}
            do.get(step.split()[-1], hospitals.take_out)(number)
            continue
        if "flwr stop" in step:
            asked = Run(hospitals.run).read().requests
            if not isinstance(hospitals, InOneProcess):  # the two trainings after it are not shown on a deployment yet
                break
        said = hospitals.type(step.removeprefix("$ "))
        serving = "serve=" in step or (serving and "flwr stop" not in step)
        if serving and ("unlearn" in step or "serve=" in step):  # the server app answers what is queued
            wait_until(lambda: not Run(hospitals.run).read().queued, LIMIT_S, "the queue is answered")
    assert "The folder is sound." in said
    state = Run(hospitals.run).read()
    status = {request.reference: request.status for request in state.requests}
    assert (hospitals.run / "evidence" / "R2.html").exists()
    assert {own.reference: own.status for own in asked} == {**dict.fromkeys(status, "in force"), "T-3": "taken back"}
    if not isinstance(hospitals, InOneProcess):
        return
    assert status == {"T-1": "finished", "T-2": "finished", "T-3": "taken back", "T-4": "finished"}
    kinds = [event.kind for event in state.events]
    assert kinds.count("continued") == kinds.count("retrained") == 1 and state.centroids is not None
