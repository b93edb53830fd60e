"""Made-up features for measuring time and memory: overlapping classes, rectified as after a last hidden layer."""

from collections import OrderedDict

import torch
from torch import nn

from fedup.federation import Federation
from fedup.partition import dirichlet

_WITHIN = 64  # dimensions in which rows of a class differ


def feature_federation(
    *, rows: int, width: int, clients: int = 10, classes: int = 10, seed: int = 0
) -> tuple[Federation, nn.Module]:
    """Features spread over clients by Dirichlet 0.5 (`rows` of them trained on), and a model that is only a head."""
    source = torch.Generator().manual_seed(seed)
    total = rows * 5 // 4
    y = torch.randint(classes, (total,), generator=source)
    means = torch.randn(classes, width, generator=source)
    spread = torch.randn(_WITHIN, width, generator=source)
    x = torch.randn(total, _WITHIN, generator=source) @ spread
    x.mul_(0.9).add_(means[y]).relu_()
    federation = Federation.split(x, y, dirichlet(y, clients, seed=seed), seed=seed, heldout=0.2, validation=0.0)
    return federation, _fitted_head(federation)


def _fitted_head(federation: Federation) -> nn.Module:
    """Ridge regression onto one-hot labels, in closed form; its scale makes the softmax decided."""
    rows = federation.rows("train")
    x, y = federation.x[rows[:10_000]], federation.y[rows[:10_000]]
    mean = x.mean(0)
    centered = (x - mean).double()
    onehot = nn.functional.one_hot(y, federation.num_classes).double()
    penalty = 10 * torch.eye(x.shape[1], dtype=torch.float64)
    weight = 12 * torch.linalg.solve(centered.T @ centered + penalty, centered.T @ (onehot - onehot.mean(0)))
    head = nn.Linear(x.shape[1], federation.num_classes)
    with torch.no_grad():
        head.weight.copy_(weight.T.float())
        head.bias.copy_(-(mean @ head.weight.T))
    return nn.Sequential(OrderedDict(relu=nn.ReLU(), head=head)).eval()
