"""Messages between server and clients, counted as serialised."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedup.privacy.guarantee import DP
from fedup.records import Records


@dataclass(frozen=True, slots=True)
class Release:
    """One answer of a client that reveals something of its rows."""

    client: int
    cells: int  # in the answer, with centroids or noisy statistics
    size_bytes: int  # as serialised
    what: str = "centroids"
    mechanism: str = "none"  # its protection, in words
    guarantee: DP | None = None  # None for exact answers, the paper's noise, and noise that can be replayed
    sigma: float = 0.0
    name: str = ""  # under DP: the name of its charge


@dataclass(frozen=True)
class Traffic:
    """Messages so far; the difference of two is the traffic in between.

    >>> Traffic(700, 90, 2, {0: 700}) - Traffic(200, 40, 1, {0: 200})
    Traffic(bytes_up=500, bytes_down=50, messages=1, by_client={0: 500}, releases=())
    """

    bytes_up: int = 0  # all that clients sent
    bytes_down: int = 0  # questions to clients, repeated ones too, and weights
    messages: int = 0  # to clients
    by_client: Mapping[int, int] = field(default_factory=dict)  # bytes up
    releases: Sequence[Release] = ()

    def __sub__(self, before: "Traffic") -> "Traffic":
        """The traffic since then."""
        return Traffic(
            self.bytes_up - before.bytes_up,
            self.bytes_down - before.bytes_down,
            self.messages - before.messages,
            dict(Counter(self.by_client) - Counter(before.by_client)),
            self.releases[len(before.releases) :],
        )


class Meter:
    """Counts messages."""

    def __init__(self) -> None:
        self.bytes_up = self.bytes_down = self.messages = 0
        self.by_client: Counter[int] = Counter()
        self.releases = Records(Release, {"client": "Q", "cells": "q", "size_bytes": "q"}, "name")

    def sent(self, size_bytes: int) -> None:
        """Count a message to a client."""
        self.messages += 1
        self.bytes_down += size_bytes

    def came(self, client: int | None, size_bytes: int, release: Release | None = None) -> None:
        """Count a message from a client, if it is known which."""
        self.bytes_up += size_bytes
        if client is not None:
            self.by_client[client] += size_bytes
        if release is not None:
            self.releases.append(release)

    @property
    def traffic(self) -> Traffic:
        """All messages so far."""
        return Traffic(self.bytes_up, self.bytes_down, self.messages, dict(self.by_client), self.releases[:])
