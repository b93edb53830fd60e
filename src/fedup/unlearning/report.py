"""The report of an answered request."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedup.request import Forget
from fedup.statistics.traffic import Release, Traffic

if TYPE_CHECKING:
    from fedup.unlearning.class_recall import Recall
    from fedup.unlearning.verdict import Verdict


@dataclass
class Report:
    """What the answer to a request took, and what it did."""

    requests: frozenset[Forget]  # active afterwards
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    clients_contacted: list[int] = field(default_factory=list)  # for the answer
    clients_counting: list[int] = field(default_factory=list)  # for a verdict, or to check every class
    traffic: Traffic = field(default_factory=Traffic)  # both directions, as serialised
    centroids_used: int = 0
    cells_replaced: int = 0  # by answers of clients or by sealed originals
    erasure: Mapping[str, Any] | None = None  # the eraser: what, where and why there
    delta: Mapping[str, Any] | None = None  # the change of weights: for which requests, of which clients
    notes: list[str] = field(default_factory=list)  # for people
    notes_about: dict[str, list[str]] = field(default_factory=dict)  # on one request, by its digest
    verdicts: "dict[str, Verdict]" = field(default_factory=dict)  # by digest of each new request
    class_recall: "dict[int, Recall]" = field(default_factory=dict)  # on retained rows, original and with the filter
    forced: list[str] = field(default_factory=list)  # refusals that force overrode
    withheld: frozenset[Forget] = frozenset()  # requests that stay open without a filter

    pending: dict[int, str] = field(default_factory=dict)  # by client that has not answered: what waits for it

    @property
    def worst_class(self) -> "tuple[int, Recall] | None":
        """The class that loses most recall; None if recall was not measured."""
        return max(self.class_recall.items(), key=lambda pair: pair[1].loss, default=None)

    @property
    def releases(self) -> list[Release]:
        """The clients' answers that tell something of their rows."""
        return list(self.traffic.releases)

    @property
    def bytes_up(self) -> int:
        """Bytes from clients, as serialised: answers, refusals and all else."""
        return self.traffic.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes to clients, as serialised: questions, repeated ones too, and weights."""
        return self.traffic.bytes_down

    @property
    def total_time_s(self) -> float:
        """Seconds from the request to the served filter."""
        return sum(self.time_s.values())

    def note(self, text: str, about: Iterable[Forget] = ()) -> None:
        """Add a note for people, once; on some requests or on all together."""
        if text not in self.notes:
            self.notes.append(text)
        for request in about:
            own = self.notes_about.setdefault(request.digest, [])
            if text not in own:
                own.append(text)

    def wait_for(self, client: int, part: str) -> None:
        """Record that a part of the answer waits for a client."""
        before = self.pending.get(client)
        self.pending[client] = part if before is None or part in before else f"{before}; {part}"

    def note_contact(self, client: int) -> None:
        """Record that a client is asked something."""
        if client not in self.clients_contacted:
            self.clients_contacted.append(client)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.time_s[name] = self.time_s.get(name, 0.0) + time.perf_counter() - started
