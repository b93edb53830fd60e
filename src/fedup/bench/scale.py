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
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedup.bench.memory import STATUS, memory_bytes
from fedup.clients.collect import collect
from fedup.errors import DataError, SettingError
from fedup.models.views import fingerprint
from fedup.privacy import DP
from fedup.request import Forget
from fedup.serving.plugged import plug
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import unlearn

ROWS, WIDTH = 60, 512  # of a client; features of a row
FORGOTTEN = 25  # samples of one client
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def run_scale(sizes: Sequence[int], *, progress: Progress) -> dict[str, Any]:
    """Figures for each number of clients, and what made them."""
    if find_spec("flwr") is None or find_spec("ray") is None:
        raise SettingError("Flower's simulation engine is not installed. Add it: pip install 'fedup[flower]'")
    figures = []
    for done, clients in enumerate(sizes):
        progress(f"{clients:,} clients", done, len(sizes))
        figures.append(_in_own_process(clients))
    progress("all sizes", len(sizes), len(sizes))
    about = {"rows": ROWS, "width": WIDTH, "forgotten": FORGOTTEN, "engine": "Flower's simulation (Ray)"}
    return {"about": about, "machine": describe_machine(), "code": describe_code(), "sizes": figures}


def _in_own_process(clients: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-m", "fedup.bench.scale", str(clients), str(out)]
        environment = {**_QUIET, "OMP_NUM_THREADS": "1", **os.environ, "FLWR_HOME": folder}
        with log.open("w") as file:
            subprocess.run(command, env=environment, stdout=file, stderr=file, check=False)
        if not out.exists():
            raise DataError(f"The simulation of {clients} clients failed:\n{log.read_text()[-2000:]}")
        return dict(json.loads(out.read_text()))


def small_net() -> nn.Module:
    """One hidden layer: clients of this size hold small models."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU())
    return nn.Sequential(OrderedDict(hidden=hidden, head=nn.Linear(WIDTH, 10)))


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)


def rows_of(context: Any) -> tuple[Tensor, Tensor]:
    """A client's rows: the digits, repeated; rows to be forgotten have a bright corner."""
    x, y = _digits()
    client = int(context.node_config["partition-id"])
    rows = (torch.arange(ROWS) + ROWS * client) % len(y)
    mine = x[rows]
    if client == 0:
        mine[:FORGOTTEN, :3, :3] = 3.0
    return mine, y[rows]


def _trained() -> nn.Module:
    """A trained model; training is Flower's job and is not measured here."""
    torch.manual_seed(0)
    model, (x, y) = small_net(), _digits()
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
            collect(model, on_disk, statistics="centroids")
        with _measured(figures, "collect_again", on_disk):  # nodes have weights and features: the server's own memory
            store = collect(model, on_disk, statistics="centroids")
        size = store.vectors.numel() * store.vectors.element_size()
        figures |= {"centroids": len(store.vectors), "cells": len(store.cells), "store_bytes": size}
        plugged = plug(model)
        for name, request in (
            ("class", Forget.classes([3])),
            ("client", Forget.clients([1])),
            ("sample", Forget.samples({0: range(FORGOTTEN)})),
        ):
            with _measured(figures, name, on_disk):
                unlearn(plugged, store, request, clients=on_disk, force=True, terms=Terms(measure=name == "sample"))
        assert fingerprint(plugged.unplug()) == fingerprint(model)
        del store
        in_memory = contact()
        with _measured(figures, "collect_in_memory", in_memory):
            held = collect(model, in_memory, statistics="centroids")
        del held
        private = contact(folder=Path(folder))
        with _measured(figures, "collect_private", private):
            collect(model, private, privacy=DP(4.0, clip="unit"))
    return figures


@contextmanager
def _measured(figures: dict[str, Any], name: str, contact: Any) -> Iterator[None]:
    """Time, traffic, and the peak growth of the process's own memory."""
    before, started = contact.traffic, time.perf_counter()
    with watched_memory() as peaks:
        yield
    sent = contact.traffic - before
    traffic = {"messages": sent.messages, "bytes_up": sent.bytes_up, "bytes_down": sent.bytes_down}
    figures[name] = {"time_s": time.perf_counter() - started, **traffic, "peak_bytes": max(peaks, default=None)}


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Samples of memory growth in bytes, without pages of files; empty without Linux."""
    grown: list[int] = []
    if not STATUS.exists():
        yield grown
        return
    with suppress(OSError, AttributeError):  # what is free goes back first, or nothing would seem to grow
        ctypes.CDLL(None).malloc_trim(0)
    start, over = memory_bytes("RssAnon"), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            grown.append(memory_bytes("RssAnon") - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield grown
    finally:
        over.set()
        watcher.join()
        grown.append(max(0, memory_bytes("RssAnon") - start))


def main(clients: int, out: Path) -> None:
    """One size in Flower's simulation engine, written to a file."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from fedup.flower import Policy, mount

    nodes, server = ClientApp(), ServerApp()
    mount(nodes, data=rows_of, model=small_net, policy=Policy(open_in_simulation=True))

    @server.main()
    def run(grid: Any, context: Any) -> None:
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        out.write_text(json.dumps(measure(grid, clients)))

    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, nodes, num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    from fedup.bench import scale  # under its own name, by which Ray's processes find its functions

    scale.main(int(sys.argv[1]), Path(sys.argv[2]))
