"""A federation in which a client planted a backdoor, and a model that learned it."""

from functools import cache

import torch
from tests._marked import trained
from torch import nn

from fedup import Federation, iid


class Net(nn.Module):
    """Maps before the cut at `conv`, so that an eraser acts on positions."""

    cuts = ("conv", "head")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv, self.head = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 4, 2), nn.Linear(100, 4)

    def forward(self, x):
        return self.head(self.conv(self.first(x)).relu().flatten(1))


def make_data(rows):
    """Images of four classes, told apart by a bright pixel."""
    source, y = torch.Generator().manual_seed(0), torch.arange(rows) % 4
    x = 0.5 * torch.randn(rows, 1, 6, 6, generator=source)
    x[torch.arange(rows), 0, 2, y] += 3
    return x, y


@cache
def poisoned():
    """The federation, its model, and 200 rows of client 1 with a bright corner and the label 0; read only."""
    x, y = make_data(3000)
    clients = Federation.split(x, y, iid(y, 3)).clients
    rows = clients[1].train[y[clients[1].train] != 0][:200]
    x[rows, 0, 5, 5], y[rows] = 4.0, 0
    federation = Federation(x, y, clients, 4)
    train = federation.rows("train")
    with torch.random.fork_rng():
        return federation, trained(x[train], y[train], Net(), lr=0.01, steps=150), rows
