"""Moments of very many clients: what merging them takes, and what a request costs then."""

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fedup.bench.memory import STATUS, memory_bytes
from fedup.bench.speed._rows import Row, Tell
from fedup.bench.turns import in_turns
from fedup.clients.collect import collect
from fedup.clients.moments import ClientMoments
from fedup.errors import ContactError, FedUPError
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import plug
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.traffic import Traffic
from fedup.targets import Targets
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import unlearn

CLIENTS = (10, 100_000)
WIDTH, CLASSES = 128, 10
_ROWS = 100  # of a client
_DIFFERENT = 20  # clients; the others repeat their numbers
_REPEATS = 9
_CONFIG = MomentConfig(by_class="never")  # as small clients choose


def measure_growth(device: torch.device, tell: Tell) -> Iterator[Row]:
    """A client request with many clients over one with few, and the memory that merging their messages takes."""
    few, many = CLIENTS
    tell(f"moments of {many:,} clients")
    with TemporaryDirectory() as folder:
        model = _model().to(device)
        stores = {str(n): collect(model, _Messages(n, Path(folder)), statistics=_CONFIG) for n in CLIENTS}
        plugs = iter([plug(model) for _ in range((1 + _REPEATS) * len(stores))])

        def request(clients: str) -> None:
            unlearn(next(plugs), stores[clients], Forget.clients([3]), terms=Terms(measure=False))

        times = in_turns({name: partial(request, name) for name in stores}, device, repeats=_REPEATS)
    detail = {"width": WIDTH, "classes": CLASSES, "request_s": {name: times.median(name) for name in stores}}
    name = f"client request from moments, {many:,} clients over {few}"
    yield Row(name, times.ratio(str(many), str(few)), "×", 1.2, detail=detail)
    tell(f"memory to merge the moments of {many:,} clients")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = float(pool.apply(_merging_bytes, (many,)))
    yield Row(f"peak memory to merge the moments of {many:,} clients", peak / 1e6, "MB", 300, detail={"width": WIDTH})


def _merging_bytes(clients: int) -> float:
    """Peak memory above the level before, with messages that come one by one; NaN without Linux."""
    if not STATUS.exists():
        return float("nan")
    with TemporaryDirectory() as folder:
        contact = _Messages(clients, Path(folder))
        collect(_model(), replace(contact, count=10), statistics=_CONFIG)  # libraries allocate on first use
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present level
        level = memory_bytes("VmRSS")
        collect(_model(), contact, statistics=_CONFIG)
        return memory_bytes("VmHWM") - level


def _model() -> nn.Module:
    """A last layer alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, CLASSES))


@dataclass(frozen=True)
class _Messages:
    """A contact whose clients have answered already: only what the server does is measured."""

    count: int
    vectors_folder: Path | None
    num_classes: int = CLASSES
    targets: Targets = "classes"
    near: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    traffic: Traffic = field(default_factory=Traffic)
    silent: Mapping[int, str] = field(default_factory=dict)
    absent: Collection[int] = ()

    @property
    def clients(self) -> Sequence[int]:
        return range(self.count)

    def failure(self, client: int) -> FedUPError:
        return ContactError(f"Client {client} gave no answer.")

    def check(self, request: Forget) -> None:
        """Nothing is known of clients."""

    def settled(self) -> None:
        """Nothing is cached."""

    def ask(self, questions: Any, **settings: Any) -> Iterator[tuple[int, Any]]:
        """Nobody is asked anything else."""
        return iter(())

    def ask_everyone(self, question: Any, **settings: Any) -> Iterator[tuple[int, Any]]:
        """The messages one by one, each in memory of its own."""
        for client in self.clients:
            sent = self._different[client % _DIFFERENT]
            moments = IntegerMoments(sent.counts.clone(), sent.sums.clone(), sent.second.clone())
            yield client, ClientMoments(client, moments, shape=(WIDTH,), nonnegative=True)

    @cached_property
    def _different(self) -> list[IntegerMoments]:
        source, labels = generator(0, "speed", "moments"), torch.arange(_ROWS) % CLASSES
        means = torch.randn(CLASSES, WIDTH, generator=source)
        return [
            IntegerMoments.of(
                (means[labels] + torch.randn(_ROWS, WIDTH, generator=source)).relu(), labels, CLASSES, _CONFIG
            )
            for _ in range(_DIFFERENT)
        ]
