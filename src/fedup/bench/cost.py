"""What an answer takes: time by stage, bytes, clients, local steps; the same for every method."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fedup.artifacts import serialized_size
from fedup.federation import Federation
from fedup.training.averaging import Weights
from fedup.training.fedavg import Observer
from fedup.training.local import LocalTraining

Probe = Callable[[nn.Module], dict[str, float]]


@dataclass
class Cost:
    """Cost from request to effect; `ahead` is the work before any request, once for each federation."""

    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    bytes_up: int = 0
    bytes_down: int = 0
    clients: set[int] = field(default_factory=set)  # contacted
    local_steps: int = 0  # of gradient descent, at clients
    ahead_time_s: float = 0.0
    ahead_bytes_up: int = 0
    storage_bytes: int = 0  # kept to answer later requests, or to undo this one
    path: list[dict[str, float]] = field(default_factory=list)  # figures on the way, each with its `time_s`
    _paused_s: float = field(default=0.0, compare=False, repr=False)
    _stage: tuple[float, float] = field(default=(0.0, 0.0), compare=False, repr=False)  # its start; pauses until then

    @property
    def total_time_s(self) -> float:
        """Seconds from request to effect."""
        return sum(self.time_s.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a stage, less the time that probes took."""
        self._stage = _now(), self._paused_s
        try:
            yield
        finally:
            self.time_s[name] = self.time_s.get(name, 0.0) + self._spent(_now())

    def count(self, *, bytes_up: int, bytes_down: int, clients: Iterable[int]) -> None:
        """Add messages after the request, and the clients involved."""
        self.bytes_up += bytes_up
        self.bytes_down += bytes_down
        self.clients.update(clients)

    def probe(self, probe: Probe, model: nn.Module) -> None:
        """Record the model's figures within a stage; the clock stops meanwhile."""
        started = _now()
        self.path.append({"time_s": self.total_time_s + self._spent(started), **probe(model)})
        self._paused_s += _now() - started

    def _spent(self, now: float) -> float:
        """Seconds in this stage, pauses left out."""
        started, paused = self._stage
        return now - started - (self._paused_s - paused)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        values = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {**values, "clients": sorted(self.clients)}


class Meter(Observer):
    """Counts what rounds of FedAvg cost: each client of a cohort gets the weights and sends its own back."""

    def __init__(self, cost: Cost, federation: Federation, local: LocalTraining, probe: Probe | None = None) -> None:
        self._cost, self._federation, self._local, self._probe = cost, federation, local, probe
        self._size: int | None = None

    def on_update(self, round_index: int, client: int, *, before: Weights, after: Weights, weight: float) -> None:
        self._size = self._size or serialized_size(dict(before), {})
        self._cost.count(bytes_up=self._size, bytes_down=self._size, clients=[client])
        self._cost.local_steps += self._local.steps_of(len(self._federation.client(client).train))

    def on_round(self, round_index: int, model: nn.Module) -> None:
        if self._probe is not None:
            self._cost.probe(self._probe, model)


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
