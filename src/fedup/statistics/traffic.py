"""What travels between server and clients, counted as it is serialised."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedup.privacy.guarantee import DP


@dataclass(frozen=True)
class Release:
    """One answer of a client that tells something of its rows."""

    client: int
    cells: int  # whose centroids, or noisy statistics, it holds
    size_bytes: int  # as serialised
    what: str = "centroids"
    mechanism: str = "none"  # what protects it, in words
    guarantee: DP | None = None  # none for exact answers, for noise of the paper, and for noise that can be replayed
    sigma: float = 0.0
    name: str = ""  # under DP: what it was charged by


@dataclass(frozen=True)
class Traffic:
    """Messages so far, or those of one call: the difference of two.

    >>> Traffic(700, 90, 2, {0: 700}) - Traffic(200, 40, 1, {0: 200})
    Traffic(bytes_up=500, bytes_down=50, messages=1, by_client={0: 500}, releases=())
    """

    bytes_up: int = 0  # from clients: all that came
    bytes_down: int = 0  # to clients: questions, however often, and weights
    messages: int = 0  # to clients
    by_client: Mapping[int, int] = field(default_factory=dict)  # bytes up
    releases: tuple[Release, ...] = ()

    def __sub__(self, before: "Traffic") -> "Traffic":
        """What came after that."""
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
        self.releases: list[Release] = []

    def sent(self, size_bytes: int) -> None:
        """A message to a client."""
        self.messages += 1
        self.bytes_down += size_bytes

    def came(self, client: int | None, size_bytes: int, release: Release | None = None) -> None:
        """A message from a client, if it is known from which."""
        self.bytes_up += size_bytes
        if client is not None:
            self.by_client[client] += size_bytes
        if release is not None:
            self.releases.append(release)

    @property
    def traffic(self) -> Traffic:
        """So far."""
        return Traffic(self.bytes_up, self.bytes_down, self.messages, dict(self.by_client), tuple(self.releases))
