"""A federation that trained a model of the built-in digits: good enough for filters with the default settings."""

import copy

import torch
from torch import nn

from fedup import Federation, LocalTraining, collect, dirichlet, federate
from fedup.tasks.datasets import load_dataset


class TrainedDigits:
    """Six clients with Dirichlet shares; test rows that none of them holds."""

    def __init__(self):
        digits = load_dataset("digits")
        self.x, self.y, self.test_x, self.test_y = digits.x, digits.y, digits.test_x, digits.test_y
        self.federation = Federation.split(self.x, self.y, dirichlet(self.y, 6), num_classes=10)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
            start = nn.Sequential(nn.Flatten(), *layers)
        self.model = federate(start, self.federation, rounds=15, local=LocalTraining(batch_size=16)).model
        self.collected = collect(self.model, self.federation, statistics="centroids")

    def store(self):
        """Centroids of its own for each test."""
        return copy.deepcopy(self.collected)

    def frequent(self, client):
        """A client's most frequent class, and its training rows of it."""
        train = self.federation.client(client).train
        label = int(self.y[train].mode().values)
        return label, train[self.y[train] == label]

    @torch.no_grad()
    def test_accuracy(self, model):
        """By class, in points."""
        hits = model(self.test_x).argmax(1) == self.test_y
        return torch.stack([100 * hits[self.test_y == label].double().mean() for label in range(10)])
