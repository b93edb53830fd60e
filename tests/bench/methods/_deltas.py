"""A small federation and model for methods that put deltas on layers."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedup import Federation, Forget
from fedup.tasks.recipe import Recipe

SIZES = (13, 20, 9, 26)  # training rows of the four clients; batches of 8
CLASSES = 4
RECIPE = Recipe("digits", "lenet5", rounds=3, clients=len(SIZES), batch_size=8, lr=0.1, seed=5)
CLASS = Forget.classes([1])
REQUESTS = {"client": Forget.clients([1]), "class": CLASS, "sample": Forget.samples({0: [0, 3, 5]})}
REQUESTS["client, class and sample"] = Forget.clients([1]) | CLASS | Forget.samples({0: [0, 1, 5]})


def make_federation() -> Federation:
    total = sum(SIZES)
    x = 0.3 * torch.randn(total, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(total) % CLASSES
    x[torch.arange(total), 0, y] += 2  # each class has a bright line of its own
    return Federation.split(x, y, list(torch.arange(total).split(list(SIZES))), heldout=0, validation=0)


def make_model() -> nn.Module:
    """Convolution, linear layers, both kinds of normalisation, and dropout, which a frozen model leaves out."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = {"conv": nn.Conv2d(1, 3, 3), "norm": nn.BatchNorm2d(3), "relu": nn.ReLU(), "flatten": nn.Flatten()}
        layers |= {"wide": nn.Linear(12, 10), "norm2": nn.BatchNorm1d(10), "relu2": nn.ReLU()}
        layers |= {"dropout": nn.Dropout(0.3), "layer_norm": nn.LayerNorm(10), "head": nn.Linear(10, CLASSES)}
        return nn.Sequential(OrderedDict(layers))


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)
