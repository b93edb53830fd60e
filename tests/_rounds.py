"""A small federation and a model with all that rounds treat differently: BatchNorm, dropout, tables not trained."""

import torch
from torch import nn

from fedup import Federation, LocalTraining, dirichlet

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
