"""What a federation of many small clients costs FedUP: messages, bytes, memory, disk and time over Flower's simulation.

Each size runs in a process of its own: `python -m fedup.bench.scale 100 OUT.json` is one of them.
"""

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedup.clients.collect import collect
from fedup.errors import DataError, SettingError
from fedup.models.views import fingerprint
from fedup.privacy import DP
from fedup.request import Forget
from fedup.serving.plugged import plug
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.unlearning.unlearn import unlearn

ROWS, WIDTH = 60, 512  # of a client; features of a row
FORGOTTEN = 25  # samples of one client
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_STATUS = Path("/proc/self/status")


def run_scale(sizes: Sequence[int], *, progress: Progress) -> dict[str, Any]:
    """Figures for each number of clients, and what made them."""
    if find_spec("flwr") is None or find_spec("ray") is None:
        raise SettingError("Flower's simulation engine is not installed. Add it: pip install 'fedup[flower]'")
    found = []
    for done, clients in enumerate(sizes):
        progress(f"{clients:,} clients", done, len(sizes))
        found.append(_in_own_process(clients))
    progress("all sizes", len(sizes), len(sizes))
    about = {"rows": ROWS, "width": WIDTH, "forgotten": FORGOTTEN, "engine": "Flower's simulation (Ray)"}
    return {"about": about, "machine": describe_machine(), "code": describe_code(), "sizes": found}


def _in_own_process(clients: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-m", "fedup.bench.scale", str(clients), str(out)]
        environment = {**_QUIET, "OMP_NUM_THREADS": "1", **os.environ, "FLWR_HOME": folder}
        with log.open("w") as file:
            subprocess.run(command, env=environment, stdout=file, stderr=file, check=False)
        if not out.exists():
            raise DataError(f"The simulation of {clients} clients failed:\n{log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


class SmallNet(nn.Module):
    """One hidden layer: clients of this size hold small models."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x))
        return logits


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)


def rows_of(context: Any) -> tuple[Tensor, Tensor]:
    """A client's: the digits, over and over; those that are to be forgotten have a bright corner."""
    x, y = _digits()
    client = int(context.node_config["partition-id"])
    rows = (torch.arange(ROWS) + ROWS * client) % len(y)
    mine = x[rows]
    if client == 0:
        mine[:FORGOTTEN, :3, :3] = 3.0
    return mine, y[rows]


def _trained() -> nn.Module:
    """As a federation would have it: its training is Flower's, and nothing of it is measured here."""
    torch.manual_seed(0)
    model, (x, y) = SmallNet(), _digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def measure(grid: Any, clients: int) -> dict[str, Any]:
    """Collect and answer over a grid of that many nodes."""
    from fedup.flower import Delivery, GridContact

    model = _trained()
    with TemporaryDirectory() as folder:

        def contact(folder: Path | None = None, **settings: Any) -> GridContact:
            example, delivery = torch.zeros(1, 8, 8), Delivery(timeout_s=600, **settings)
            return GridContact(grid, model, example=example, num_classes=10, delivery=delivery, folder=folder)

        on_disk = contact(weights_at_once=True, folder=Path(folder))
        figures: dict[str, Any] = {"clients": clients, "model_bytes": 4 * sum(p.numel() for p in model.parameters())}
        with _measured(figures, "who", on_disk):  # the engine starts its workers
            assert len(on_disk.clients) == clients
        with _measured(figures, "collect", on_disk):
            collect(model, on_disk, folder=folder)
        with _measured(figures, "collect_again", on_disk):  # nodes have weights and features: the server's own memory
            store = collect(model, on_disk, folder=folder)
        figures |= {
            "centroids": len(store.vectors),
            "cells": len(store.cells),
            "store_bytes": store.vectors.numel() * store.vectors.element_size(),
        }
        plugged = plug(model)
        for name, request in (
            ("class", Forget.classes([3])),
            ("client", Forget.clients([1])),
            ("sample", Forget.samples({0: range(FORGOTTEN)})),
        ):
            with _measured(figures, name, on_disk):
                unlearn(plugged, store, request, clients=on_disk, force=True)
        assert fingerprint(plugged.unplug()) == fingerprint(model)
        del store
        in_memory = contact()
        with _measured(figures, "collect_in_memory", in_memory):
            held = collect(model, in_memory)
        del held
        private = contact(folder=Path(folder))
        with _measured(figures, "collect_private", private):
            collect(model, private, privacy=DP(4.0, clip="unit"), folder=folder)
    return figures


@contextmanager
def _measured(figures: dict[str, Any], name: str, contact: Any) -> Iterator[None]:
    before, started = contact.traffic, time.perf_counter()
    with _Peak() as peak:
        yield
    of_this = contact.traffic - before
    traffic = {key: getattr(of_this, key) for key in ("messages", "bytes_up", "bytes_down")}
    figures[name] = {"time_s": time.perf_counter() - started, **traffic, "peak_bytes": peak.grown}


class _Peak:
    """By how many bytes the process's own memory has grown at most, without pages of files; None where Linux is not."""

    def __init__(self) -> None:
        self.grown: int | None = None
        self._over = threading.Event()

    def __enter__(self) -> "_Peak":
        if _STATUS.exists():
            with suppress(OSError, AttributeError):  # what is free goes back first, or nothing would seem to grow
                ctypes.CDLL(None).malloc_trim(0)
            self._start = _own_bytes()
            self.grown = 0
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.grown = max(self.grown or 0, _own_bytes() - self._start)

    def __exit__(self, *error: object) -> None:
        if self.grown is not None:
            self._over.set()
            self._watch.join()
            self.grown = max(self.grown, _own_bytes() - self._start)


def _own_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _simulate(clients: int, use: Callable[[Any], None]) -> None:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from fedup.flower import mount

    nodes, server = ClientApp(), ServerApp()
    mount(nodes, data=rows_of, model=SmallNet)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        use(grid)

    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, nodes, num_supernodes=clients, backend_config=resources)


def main(clients: int, out: Path) -> None:
    """Of one size, written to a file."""

    def write(grid: Any) -> None:
        out.write_text(json.dumps(measure(grid, clients)))

    _simulate(clients, write)


if __name__ == "__main__":
    from fedup.bench import scale  # under its own name, by which Ray's processes find its functions

    scale.main(int(sys.argv[1]), Path(sys.argv[2]))
