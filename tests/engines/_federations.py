"""Small federations with all that makes engines differ: odd sizes, empty clients, normalisation and dropout."""

import torch
from torch import Tensor, nn

from fedup.federation import Client, Federation
from fedup.training.engines.plain import PlainEngine
from fedup.training.local import Job, LocalTraining

SIZES = (70, 64, 33, 0, 17, 5, 1, 130, 64, 9, 200)  # rows that clients train on


def make_federation(sizes: tuple[int, ...] = SIZES, *, images: bool = False, seed: int = 0) -> Federation:
    """Clients of these sizes over rows of three classes."""
    source = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(3, (total,), generator=source)
    x = torch.randn(total, *((2, 8, 8) if images else (6,)), generator=source)
    x.flatten(1)[torch.arange(total), y] += 2
    order = torch.randperm(total, generator=source)
    nothing = torch.zeros(0, dtype=torch.long)
    clients = tuple(Client(i, rows.sort().values, nothing, nothing) for i, rows in enumerate(order.split(list(sizes))))
    return Federation(x, y, clients, 3)


class Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def make_model(kind: str) -> nn.Module:
    """A small model of a kind; "convolution" takes images, the others vectors."""
    torch.manual_seed(1)
    if kind == "convolution":
        return nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
            Flatten(),
            nn.Linear(72, 3),
        )
    middle = {
        "plain": nn.Identity(),
        "batchnorm": nn.BatchNorm1d(16),
        "layernorm": nn.LayerNorm(16),
        "dropout": nn.Dropout(0.3),
        "all": nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.LayerNorm(16)),
    }[kind]
    # A bias before a BatchNorm has no effect and a gradient of pure rounding, which Adam blows up: none there.
    return nn.Sequential(nn.Linear(6, 16, bias=kind not in ("batchnorm", "all")), middle, nn.ReLU(), nn.Linear(16, 3))


KINDS = ("plain", "batchnorm", "layernorm", "dropout", "all", "convolution")


def federation_for(kind: str, sizes: tuple[int, ...] = SIZES) -> Federation:
    """Rows that a model of this kind takes."""
    return make_federation(sizes, images=kind == "convolution")


def train_locally(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, *, local: LocalTraining, seed: int) -> None:
    """Train `model` in place on the rows, as a client does in a round."""
    PlainEngine(model, x, y, local).run(Job(0, rows.cpu(), local, seed))
