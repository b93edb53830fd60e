"""A federation in which some rows of two clients carry marks: sample requests that an eraser is made for."""

import copy
import sys
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache

import pytest
import torch
from tests._forced import unlearn
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, fingerprint, iid, plug
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.in_process import InProcess
from fedup.privacy import Ledger
from fedup.statistics.cell_table import CellTable
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.client_parts import ClientParts
from fedup.statistics.traffic import Traffic

EARLY, LATE = "2", "4"  # cuts of the model; the bottleneck sits at the late one
FAST = {"rank": 4, "steps": 10, "batch_size": 32}
AUTO = FilterConfig(**FAST)
KINDS = {
    "eraser alone": FilterConfig(**FAST, filter="erasure", eraser_cut=EARLY),
    "both at one cut": FilterConfig(**FAST, filter="both", eraser_cut=LATE),
    "both at two cuts": FilterConfig(**FAST, filter="both", eraser_cut=EARLY),
}
FILTERS = {"bottleneck": FilterConfig(**FAST, filter="bottleneck"), **KINDS}


class Marked:
    """Three clients with four classes; client 1 has 30 and 25 marked rows, client 2 another 25."""

    def __init__(self):
        torch.manual_seed(0)
        self.y = torch.arange(800) % 4
        self.x = 0.5 * torch.randn(800, 8) + 3 * nn.functional.one_hot(self.y, 8)
        clients = Federation.split(self.x, self.y, iid(self.y, 3)).clients
        self.rows = {"first": clients[1].train[:30], "second": clients[1].train[30:55], "third": clients[2].train[:25]}
        for channel, rows in zip((5, 6, 7), self.rows.values(), strict=True):
            self.x[rows, channel] += 4
        self.federation = Federation(self.x, self.y, clients, 4)
        self.base = trained(self.x, self.y)
        self.collected = collect(self.base, self.federation, statistics=CentroidConfig(ratio=0.5))
        self.requests = {
            "first": Forget.samples({1: self.rows["first"]}),
            "second": Forget.samples({1: self.rows["second"]}),
            "third": Forget.samples({2: self.rows["third"]}),
            "few": Forget.samples({1: self.rows["second"][:19]}),
            "bystander": Forget.samples({0: clients[0].train[:5]}),
            "class": Forget.classes([2]),
            "client": Forget.clients([0]),
            "client and class": Forget.clients([0]) | Forget.classes([2]),
        }

    def store(self):
        return copy.deepcopy(self.collected)

    def serving(self, *names, config=AUTO, clients=None):
        """A model that answers these requests, asked one after another, and its centroids."""
        plugged, store = plug(self.base), self.store()
        for name in names:
            unlearn(plugged, store, self.requests[name], clients=clients or self.federation, config=config)
        return plugged, store

    def with_rows(self, rows, value):
        """The same federation with other content in some rows."""
        x = self.x.clone()
        x[rows] = value
        return Federation(x, self.y, self.federation.clients, 4)


@cache
def marked():
    """One of these for all tests of a process; read only."""
    return Marked()


def trained(x, y, *layers, lr=0.02, steps=60):
    """A model of these layers, or of four classes with two cuts, that knows the rows."""
    usual = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)
    model = layers[0] if len(layers) == 1 else nn.Sequential(*(layers or usual))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for weight in model.parameters():
        weight.grad = None
    return model.eval()


class Unreachable:
    """Clients that must not be asked."""

    traffic = Traffic()
    near = False

    def __init__(self, store=None):
        if store is not None:  # what they spent is known at the server
            self.ledger = store.ledger

    def __getattr__(self, name):
        raise AssertionError(f"a client was asked: {name}")


class Watched(InProcess):
    """Notes which clients are asked for statistics; can change or refuse these, or make them of other rows."""

    def __init__(self, marked, change=lambda answer: answer, statistics_of=None):
        super().__init__(marked.federation, marked.base)
        self.sketched, self.measured, self.gathered, self._change = [], [], [], change
        self._statistics = InProcess(statistics_of or marked.federation, marked.base)
        self._statistics._meter = self._meter

    def _answer(self, client, question):
        asked = {SketchesQuestion: self.sketched, SpreadsQuestion: self.measured, SecondMomentsQuestion: self.gathered}
        if type(question) not in asked:
            return super()._answer(client, question)
        asked[type(question)].append(client)
        answer = self._statistics._answer(client, question)
        return self._change(answer) if isinstance(question, SecondMomentsQuestion) else answer

    @property
    def statistics_asked(self):
        """All whom an eraser's statistics were asked of."""
        return [*self.sketched, *self.measured, *self.gathered]


def noted_examples(monkeypatch):
    """All that filters are fitted to from now on."""
    seen, module = [], sys.modules["fedup.unlearning.bottleneck_fit"]
    real = module.fit_filter
    monkeypatch.setattr(
        module, "fit_filter", lambda tail, some, *a, **k: seen.append(some) or real(tail, some, *a, **k)
    )
    return seen


def weights_of(plugged):
    """All weights of the served filters, by place and name."""
    return {
        f"{cut} {type(fitted).__name__} {name}": tensor
        for cut, fitted in plugged.served.placed
        for name, tensor in fitted.state_dict().items()
    }


def same_bits(one, other):
    """Whether two plugged models have the very same filters."""
    one, other = weights_of(one), weights_of(other)
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def state_of(store):
    """All that a store holds, comparable with ==."""
    return {field.name: _plain(getattr(store, field.name)) for field in fields(store)}


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, Ledger):
        return value.to_json()
    if isinstance(value, ClientParts):
        return {client: value.place(client).digest for client in value}
    if isinstance(value, CellTable):
        return tuple(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, Traffic):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return tuple(map(_plain, value)) if isinstance(value, tuple) else copy.copy(value)


def everything_of(plugged, store):
    """All that a refusal must leave alone, comparable with ==."""
    bits = {name: weight.numpy().tobytes() for name, weight in weights_of(plugged).items()} if plugged.served else {}
    return id(plugged.served), bits, state_of(store), plugged.requests, fingerprint(plugged.base)


@contextmanager
def refused(plugged, store, error, match=None):
    """What is done inside raises, and changes nothing."""
    before = everything_of(plugged, store)
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert everything_of(plugged, store) == before
