"""What answering a request took."""

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
    """What answering a request took."""

    requests: frozenset[Forget]  # active afterwards
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    clients_contacted: list[int] = field(default_factory=list)  # to answer
    clients_counting: list[int] = field(default_factory=list)  # answers, for a verdict or to check every class
    traffic: Traffic = field(default_factory=Traffic)  # messages of both directions, as serialised
    centroids_used: int = 0
    cells_replaced: int = 0  # by what clients sent, or by sealed originals
    erasure: Mapping[str, Any] | None = None  # what is erased, where and why there
    notes: list[str] = field(default_factory=list)  # for people
    notes_about: dict[str, list[str]] = field(default_factory=dict)  # those on one request, by its digest
    verdicts: "dict[str, Verdict]" = field(default_factory=dict)  # by digest of each request that is new
    class_recall: "dict[int, Recall]" = field(default_factory=dict)  # on retained rows, original and with the filter
    forced: list[str] = field(default_factory=list)  # what would have been refused without force
    withheld: frozenset[Forget] = frozenset()  # requests that stay open: no filter was served for them

    @property
    def worst_class(self) -> "tuple[int, Recall] | None":
        """The class that loses most of its recall; None where it was not measured."""
        return max(self.class_recall.items(), key=lambda pair: pair[1].loss, default=None)

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

    def note(self, text: str, about: Iterable[Forget] = ()) -> None:
        """Something that people should know, of some requests or of all together; once."""
        if text not in self.notes:
            self.notes.append(text)
        for request in about:
            own = self.notes_about.setdefault(request.digest, [])
            if text not in own:
                own.append(text)

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
