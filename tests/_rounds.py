"""A small federation and a model with all that rounds treat differently: BatchNorm, dropout, tables not trained."""

import copy

import torch
from torch import nn

from fedup import Federation, LocalTraining, Observer, dirichlet

LOCAL = LocalTraining(batch_size=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 3))
        self.register_buffer("table", torch.tensor([-4, 7]))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.layers(x)


def make_net():
    torch.manual_seed(0)
    return Net()


def make_federation():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    x = torch.randn(150, 6) + 2 * nn.functional.one_hot(y, 6)
    return Federation.split(x, y, dirichlet(y, 4, seed=1))


class Recorder(Observer):
    """Copies of all that is shown."""

    def __init__(self):
        self.updates, self.rounds = [], []

    def on_update(self, round_index, client, *, before, after, weight):
        before, after = ({name: tensor.clone() for name, tensor in each.items()} for each in (before, after))
        self.updates.append((round_index, client, before, after, weight))

    def on_round(self, round_index, model):
        self.rounds.append((round_index, copy.deepcopy(model.state_dict())))

    def cohorts(self):
        return [[client for r, client, *_ in self.updates if r == i] for i, _ in self.rounds]


def same_bits(one, other):
    """Whether two sets of tensors are the very same."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
