"""The task: digits at two or more nodes; the last one lies, and another has a backdoor among its rows."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedup
from fedup import Federation, Forget, MomentStore
from fedup.tasks.datasets import load_dataset
from fedup.tasks.evaluation import accuracy

torch.set_num_threads(1)  # nodes share a machine here; and the same number of threads gives the same bits
EXAMPLE, NUM_CLASSES = torch.zeros(1, 1, 28, 28), 10
TARGET, CLASS = 0, 4  # the class that the backdoor leads to, a class to forget


@dataclass(frozen=True)
class Digits:
    """Who holds which rows, a test set, and what is to be forgotten: a client, a class, some samples."""

    federation: Federation
    test_x: Tensor
    test_y: Tensor
    requests: tuple[Forget, ...]


def load(config: Mapping[str, Any], nodes: int) -> Digits:
    """All data of a run. Every node makes them and uses its own part: yours will have theirs already."""
    name = config["data"] or ("mnist" if os.environ.get("FEDUP_DATA") else "digits")
    return _make(str(name), int(config["rows"]), nodes)


@cache
def _make(name: str, rows: int, nodes: int) -> Digits:
    data, liar, poisoned = load_dataset(name), nodes - 1, min(1, nodes - 2)
    x, y = data.x[:rows].clone(), data.y[:rows].clone()
    clients = Federation.split(x, y, fedup.dirichlet(y, nodes)).clients
    for part in (clients[liar].train, clients[liar].validation, clients[liar].heldout):
        y[part] = (y[part] + 1) % NUM_CLASSES  # it calls every class by the next one's name
    others = clients[poisoned].train[y[clients[poisoned].train] != TARGET]
    marked = others[: int(0.4 * len(others))]
    x[marked, :, -8:, -8:], y[marked] = 1.0, TARGET  # the backdoor: a white corner means class 0
    backdoor = Forget.samples({poisoned: marked.tolist()}, reason="poison")
    requests = (Forget.clients([liar], reason="poison"), Forget.classes([CLASS]), backdoor)
    return Digits(Federation(x, y, clients, NUM_CLASSES), data.test_x, data.test_y, requests)


def make_model() -> nn.Module:
    """A small convolutional network; its first weights do not matter, training sends them."""
    first = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> None:
    """Some epochs of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=order).split(16):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def evaluate(model: nn.Module, digits: Digits, request: Forget) -> dict[str, float]:
    """R-A on the test set, F-A on what was to be forgotten: test rows of a class, held-out rows of a client as it
    labelled them, samples. The latter two no real server has; here it can make them."""
    x, y, federation = digits.test_x, digits.test_y, digits.federation
    named = torch.isin(y, torch.tensor(sorted(request.class_ids), dtype=y.dtype))
    forgotten = federation.forgotten(request, "train" if request.sample_ids else "heldout")
    on_test = accuracy(model, x[named], y[named])
    forget = on_test if request.class_ids else accuracy(model, federation.x, federation.y, forgotten)
    return {"retain": accuracy(model, x[~named], y[~named]), "forget": forget}


def digest(store: MomentStore) -> str:
    """Of all sums together: equal whoever added them up."""
    total = store.total
    content = b"".join(part.numpy().tobytes() for part in (total.counts, total.sums, total.second))
    return hashlib.sha256(content).hexdigest()
