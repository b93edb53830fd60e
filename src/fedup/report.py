"""What answering a request took."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedup.request import Forget
from fedup.traffic import Release, Traffic

__all__ = ["Release", "Report"]


@dataclass
class Report:
    """What answering a request took."""

    requests: frozenset[Forget]  # active afterwards
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    clients_contacted: list[int] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)  # messages of both directions, as serialised
    centroids_used: int = 0
    cells_replaced: int = 0  # by what clients sent, or by sealed originals
    erasure: Mapping[str, Any] | None = None  # what is erased, where and why there
    notes: list[str] = field(default_factory=list)  # for people

    @property
    def releases(self) -> list[Release]:
        """What clients told, message by message."""
        return list(self.traffic.releases)

    @property
    def bytes_up(self) -> int:
        """Clients to server, as serialised: answers, refusals and whatever else came."""
        return self.traffic.bytes_up

    @property
    def bytes_down(self) -> int:
        """Server to clients, as serialised: questions, asked again or not, and weights."""
        return self.traffic.bytes_down

    @property
    def total_time_s(self) -> float:
        """Seconds from request to effect."""
        return sum(self.time_s.values())

    def note_contact(self, client: int) -> None:
        """A client is asked something."""
        if client not in self.clients_contacted:
            self.clients_contacted.append(client)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.time_s[name] = self.time_s.get(name, 0.0) + time.perf_counter() - started
