"""A small federation that was trained while a server kept its history, and sizes of messages counted by hand."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedup import Federation, Forget, Observer
from fedup.bench.history import History
from fedup.bench.task import Task
from fedup.tasks.recipe import Recipe

SIZES = (30, 21, 60, 26)
TARGET = 2
OWN_MODEL = """
from torch import nn

def build(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
"""


class Seen(Observer):
    """Copies of all uploads, by round and client: what re-implementations work on."""

    def __init__(self) -> None:
        self.before: dict[int, dict[str, Tensor]] = {}
        self.uploads: dict[tuple[int, int], dict[str, Tensor]] = {}

    def on_update(self, round_index, client, *, before, after, weight):
        self.before[round_index] = {name: tensor.clone() for name, tensor in before.items()}
        self.uploads[round_index, client] = {name: tensor.clone() for name, tensor in after.items()}

    def cohort(self, number: int, gone=()) -> list[int]:
        return [client for one, client in self.uploads if one == number and client not in gone]


class World:
    """A federation trained with a model of the user's own while a server and an independent observer watched."""

    def __init__(self, folder: Path, history: Path | None = None, **chosen) -> None:
        (folder / "own.py").write_text(OWN_MODEL)
        settings = {"rounds": 4, "clients": 4, "batch_size": 8, "lr": 0.05, "seed": 3, **chosen}
        self.recipe = Recipe("digits", str(folder / "own.py"), **settings)
        self.federation, self.history, self.seen = make_federation(), History(history), Seen()
        self.start = self.recipe.blank_model((6,), 3)
        observers = [self.history, self.seen]
        self.model = self.recipe.train(self.start, self.federation, observers=observers).model

    def task(self, *targets: int, **other) -> Task:
        request = Forget.clients(targets or [TARGET])
        parts = self.federation, request, self.model, self.start, self.recipe
        return replace(Task(*parts, lambda model: {}, lambda *_: None, self.history), **other)

    def steps(self, *clients: int) -> int:
        """Steps of these clients in one epoch."""
        return sum(-(-len(self.federation.client(client).train) // 8) for client in clients)


def make_federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(sum(SIZES)) % 3
    x = torch.randn(len(y), 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, torch.arange(len(y)).split(SIZES), num_classes=3)


def message(tensors) -> int:
    """Bytes of a message with these tensors."""
    plain = {name: tensor.detach().contiguous() for name, tensor in dict(tensors).items()}
    return len(save(plain, metadata={"fedup": json.dumps({})}))
