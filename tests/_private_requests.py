"""Four clients that collected under differential privacy, and the requests of tests."""

import copy
from dataclasses import replace

import torch
from tests._forced import unlearn
from torch import nn

from fedup import (
    Federation,
    FilterConfig,
    Forget,
    collect,
    iid,
    plug,
)
from fedup.clients.in_process import InProcess
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.question import PrivateQuestion
from fedup.privacy import DP, Ledger
from fedup.statistics.traffic import Traffic

CLASSES, CLIENTS, WIDTH, CUT = 4, 4, 16, "2"
CONFIG = FilterConfig(rank=8, steps=120, batch_size=64, filter="bottleneck")
FAST = FilterConfig(rank=4, steps=10, batch_size=32, filter="bottleneck")
AUTO = replace(FAST, filter="auto")
PRIVATE = DP(4.0, clip=10.0, replay_seed=1)
REAL = replace(PRIVATE, replay_seed=None)


class Setting:
    """Four clients with four classes each, which a small model knows."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.y = torch.arange(2000) % CLASSES
            self.x = 0.7 * torch.randn(2000, 8) + 3 * nn.functional.one_hot(self.y, 8)
            self.federation = Federation.split(self.x, self.y, iid(self.y, CLIENTS))
            self.base = _trained(self.x, self.y)
        self.collected = collect(self.base, self.federation, privacy=PRIVATE)
        train = self.federation.client(1).train
        self.requests = {
            "client": Forget.clients([3]),
            "class": Forget.classes([2]),
            "sample": Forget.samples({1: train[:6]}),
            "other samples": Forget.samples({1: train[6:9]}),
            "samples of another": Forget.samples({0: self.federation.client(0).train[:3]}),
        }

    def store(self, budgets=None, dp=None):
        """Collected under a ledger of its own; with a budget, which allows no noise that can be replayed, anew."""
        dp = dp or (PRIVATE if budgets is None else REAL)
        if dp == PRIVATE and budgets is None:
            return copy.deepcopy(self.collected)
        return collect(self.base, self.federation, privacy=dp, ledger=Ledger(budgets=budgets))

    def serving(self, *names, store=None, config=FAST, **options):
        plugged, store = plug(self.base), store or self.store()
        for name in names:
            unlearn(plugged, store, self.requests[name], clients=self.federation, config=config, **options)
        return plugged, store

    def accuracy(self, model, rows):
        with torch.no_grad():
            return float((model(self.x[rows]).argmax(1) == self.y[rows]).float().mean())

    def with_rows(self, rows, value):
        x = self.x.clone()
        x[rows] = value
        return replace(self.federation, x=x)


def _trained(x, y):
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for weight in model.parameters():
        weight.grad = None
    return model.eval()


SETTING = Setting()


def bits_of(plugged):
    weights = plugged.served.filter.state_dict()
    return torch.cat([weights["encoder"].flatten(), weights["decoder"].flatten()])


def uncharged(state):
    return {name: value for name, value in state.items() if name not in ("ledger", "bytes_up", "traffic")}


def payers_of(store):
    """Who was charged after the collection, in order."""
    return [charge.client for charge in store.ledger.charges[CLIENTS:]]


class Unreachable:
    """Clients that must not be asked; what they spent is known at the server."""

    traffic = Traffic()

    def __init__(self, store):
        self.ledger = store.ledger

    def __getattr__(self, name):
        raise AssertionError(f"a client was asked: {name}")


class Strict(InProcess):
    """Clients that tell nothing but what is under the guarantee."""

    def __init__(self, store):
        super().__init__(SETTING.federation, SETTING.base, ledger=store.ledger)
        self.asked = []

    def _answer(self, client, question):
        assert isinstance(question, PrivateQuestion), "a client was asked for what is not under the guarantee"
        if isinstance(question, PrivateCentroidsQuestion):
            self.asked.append((client, question.labels, question.excluded))
        return super()._answer(client, question)
