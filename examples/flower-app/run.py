"""The app in three ways: python run.py simulation | deployment | secure. What it starts it stops, whatever happens."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import keys

from fedup.tasks.machine import describe_code, describe_machine

HERE, BIN = Path(__file__).resolve().parent, Path(sys.executable).parent
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
START_S, STOP_S = 60, 20


class Processes:
    """Flower's processes, with a home of their own: the user's Flower settings are neither read nor changed."""

    def __init__(self, home: Path, logs: Path, limit_s: float) -> None:
        self._logs, self._until, self._running = logs, time.monotonic() + limit_s, []
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"  # they start each other by name
        self._environment = {**QUIET, **os.environ, "PATH": path, "FLWR_HOME": str(home)}

    def start(self, name: str, *command: str) -> None:
        """Runs until `stop`; what it says goes to a file. In a session of its own: Ctrl-C is for us to pass on."""
        with (self._logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        self._running.append((name, process))

    def call(self, *command: str, quiet: bool = True) -> str:
        """Runs to its end; what it said, if it was quiet."""
        left = max(1.0, self._until - time.monotonic())
        said = subprocess.PIPE if quiet else None
        done = subprocess.run(command, env=self._environment, stdout=said, text=True, timeout=left, check=True)
        return done.stdout or ""

    def wait_for(self, port: int) -> None:
        """Until someone listens there."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"Nobody listens on port {port} after {START_S} s.")

    def check(self) -> None:
        """Raise if one has ended by itself."""
        for name, process in self._running:
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended: see {self._logs / name}.log.")

    def stop(self) -> None:
        """Nodes first, then the link; gently, and then not."""
        for _, process in reversed(self._running):
            process.terminate()
        for _, process in reversed(self._running):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for number in self._left():  # one that does not listen, or what one started and left, as Ray does
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for _, process in self._running:
            process.wait()

    def _left(self) -> list[int]:
        """Processes of this run: all of them, and nobody else's, have its home. Linux only; elsewhere none is found."""
        ours, found = f"FLWR_HOME={self._environment['FLWR_HOME']}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # of another user, or gone meanwhile
                if ours in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(processes: Processes, way: str, home: Path, nodes: int) -> None:
    """A SuperLink, and SuperNodes unless Flower simulates them; `flwr` knows the link by the name of `fedup`."""
    port, secure = free_port(), way == "secure"
    link = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
    link += ["--disable-runtime-dependency-installation"]  # all is installed here, and there may be no internet
    link += ["--simulation"] if way == "simulation" else []
    if secure:
        keys.make_certificates(home)
        link += ["--enable-supernode-auth", "--ssl-ca-certfile", str(home / "ca.pem")]
        link += ["--ssl-certfile", str(home / "server.pem"), "--ssl-keyfile", str(home / "server.key")]
    trust = f'root-certificates = "{home / "ca.pem"}"' if secure else "insecure = true"
    (home / "config.toml").write_text(f'[superlink.fedup]\naddress = "127.0.0.1:{port}"\n{trust}\n')
    processes.start("superlink", *link, *([] if secure else ["--insecure"]))
    processes.wait_for(port)
    for node in range(0 if way == "simulation" else nodes):
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
        command += ["--node-config", f"partition-id={node} {rules_of(node, way, home)}"]
        if secure:  # a node whose key is not registered is turned away
            private, public = keys.make_node_key(home, f"node{node}")
            processes.call("flwr", "supernode", "register", str(public), "fedup")
            command += ["--auth-supernode-private-key", str(private), "--root-certificates", str(home / "ca.pem")]
        processes.start(f"supernode{node}", *command, *([] if secure else ["--insecure"]))


def rules_of(node: int, way: str, home: Path) -> str:
    """What the node's operator allows: everything, or with keys what is in a file; each node has its own beside it."""
    if way != "secure":
        return "fedup-open=true"
    rules = home / f"node{node}-rules.toml"
    rules.write_text((HERE / "node-rules.toml").read_text())
    return f'fedup-rules="{rules}"'


def run(processes: Processes, out: Path, nodes: int, way: str, config: list[str]) -> None:
    """The app itself, to its end; raises unless Flower says that it completed and it wrote its figures."""
    (out / "result.json").unlink(missing_ok=True)
    settings = [f"nodes={nodes}", f'out="{out}"', f"authenticated={str(way == 'secure').lower()}", *config]
    resources = ["--federation-config", f"num-supernodes={nodes}"] if way == "simulation" else []
    processes.call("flwr", "run", str(HERE), "fedup", "--stream", "-c", " ".join(settings), *resources, quiet=False)
    runs = json.loads(processes.call("flwr", "list", "fedup", "--format", "json"))["runs"]  # `run` tells no failure
    if [one["status"] for one in runs] != ["finished:completed"]:
        raise RuntimeError(f"The run failed: {json.dumps(runs)}.")
    result = json.loads((out / "result.json").read_text())
    about = {"way": way, "machine": describe_machine(), "code": describe_code()}
    (out / "result.json").write_text(json.dumps({**about, **result}, indent=2))
    if not all(request["restored"] for request in result["requests"]):
        raise RuntimeError("A restored model is not the original, bit for bit.")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("simulation", "deployment", "secure"))
    parser.add_argument("--out", type=Path, default=Path("runs/flower-app"), help="folder for figures and the model")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=900.0, help="give up after so many seconds")
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="as for flwr run: rounds=5, data='\"mnist\"'"
    )
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # all of them run `finally`
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))
    with TemporaryDirectory(prefix="fedup-flower-") as home:
        processes = Processes(Path(home), out, asked.limit_s)
        try:
            serve(processes, asked.way, Path(home), asked.nodes)
            run(processes, out, asked.nodes, asked.way, asked.config)
            processes.check()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            sys.exit(f"{error} What Flower's processes said is in {out}.")
        finally:
            processes.stop()
    print(f"Figures are in {out / 'result.json'}.")


if __name__ == "__main__":
    main()
