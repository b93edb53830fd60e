"""A real deployment of the app with faults: SuperLink and SuperNodes as processes, by the example's own code."""

import importlib
import json
import time
import tomllib
import uuid
from pathlib import Path

from tests.flower import _processes
from tests.flower.faulty_app.faulty import task

from fedup import Federation, dirichlet
from fedup.tasks.datasets import load_dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-app"
APP = Path(__file__).parent / "faulty_app"
LIMIT_S = 540


class Deployment:
    """Some nodes, of which each has its part of digits; `close` stops all of it, and says what still runs."""

    def __init__(self, folder: Path, monkeypatch, nodes: int) -> None:
        self.mark = f"{_processes.MARK}={uuid.uuid4()}"
        monkeypatch.setenv(*self.mark.split("="))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.syspath_prepend(str(EXAMPLE))
        self.runner = importlib.import_module("run")
        self.home, self.out, self.nodes = folder / "home", folder / "out", nodes
        for made in (self.home, self.out):
            made.mkdir()
        self.processes = self.runner.Processes(self.home, self.out, LIMIT_S)
        digits = load_dataset("digits")
        self.federation = Federation.split(digits.x, digits.y, dirichlet(digits.y, nodes), num_classes=10)
        for client in self.federation.clients:
            task.write_rows(self.out, client.id, digits.x[client.train], digits.y[client.train], client.train)

    def serve(self, way: str, nodes: int | None = None) -> None:
        self.runner.serve(self.processes, way, self.home, self.nodes if nodes is None else nodes)

    def start_stranger(self, node: int) -> None:
        """A node with a key that the link does not know; until its log says that it was turned away."""
        link = tomllib.loads((self.home / "config.toml").read_text())["superlink"]["fedup"]
        private, _ = importlib.import_module("keys").make_node_key(self.home, "stranger")
        command = ["flower-supernode", "--superlink", link["address"], "--port", str(self.runner.free_port())]
        command += ["--auth-supernode-private-key", str(private), "--root-certificates", link["root-certificates"]]
        self.processes.start("stranger", *command, "--node-config", f"partition-id={node} fedup-open=true")
        log = self.out / "stranger.log"
        wait_until(lambda: "Failed to activate SuperNode" in log.read_text(), 60, "the stranger is refused")

    def submit(self, *options: str, app: Path = APP, **config: object) -> str:
        """Start a run; with --stream, until it ends. What Flower said."""
        settings = {"out": str(self.out), "nodes": self.nodes, **config}
        told = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items())
        return self.processes.call("flwr", "run", str(app), "fedup", *options, "-c", told)

    def result(self, said: str) -> dict:
        """What the server wrote at its end."""
        assert (self.out / "result.json").exists(), said[-5000:]
        return json.loads((self.out / "result.json").read_text())

    def asked(self, client: int) -> list[dict]:
        """The questions that reached a node."""
        path = self.out / f"asked-{client}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> list[str]:
        self.processes.stop()
        return _processes.left(self.mark)


def wait_until(true, limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, f"Not after {limit_s} s: {what}."
        time.sleep(0.1)
