"""Trainable deltas on the weights of a frozen model, as FUSED uses them, and the ranking that says which get one."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedup.artifacts import serialized_size
from fedup.bench.cost import Cost
from fedup.bench.history import History
from fedup.bench.task import Task
from fedup.federation import Federation
from fedup.rng import generator


def ranking(model: nn.Module, history: History) -> list[str]:
    """Layers by the mean change of an entry between weights sent out and sent back, over rounds and clients; a layer is
    a tensor of weights of two dimensions or more: normalisation stays as it is."""
    changes = history.changes()
    return sorted((name for name, weight in model.named_parameters() if weight.ndim >= 2), key=lambda n: -changes[n])


class Sparse(nn.Module):
    """A delta at some entries of a tensor, drawn at random."""

    where: Tensor

    def __init__(self, weight: Tensor, density: float, seed: int, name: str) -> None:
        super().__init__()
        count = max(1, round(density * weight.numel()))
        drawn = torch.randperm(weight.numel(), generator=generator(seed, "mask", name))[:count].sort().values
        self.values = nn.Parameter(torch.zeros(count, dtype=weight.dtype, device=weight.device))
        object.__setattr__(self, "where", drawn.to(weight.device))  # no buffer: seeds are sent, not masks

    def forward(self, weight: Tensor) -> Tensor:
        return weight.flatten().index_add(0, self.where, self.values).view(weight.shape)


class LowRank(nn.Module):
    """A delta of low rank (LoRA), over a tensor's first dimension and all others, times `scale`; of a convolution it is
    what a convolution to `rank` channels and a 1×1 convolution back add."""

    def __init__(self, weight: Tensor, rank: int, seed: int, name: str, *, scale: float = 1.0) -> None:
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        self.scale = scale
        random = torch.rand(rank, columns, generator=generator(seed, "lora", name)) * 2 - 1
        self.down = nn.Parameter((random / columns**0.5).to(weight))  # as nn.Linear and nn.Conv2d start
        self.up = nn.Parameter(torch.zeros(rows, rank, dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down).view(weight.shape)


class Adapted(nn.Module):
    """A frozen model and deltas on some of its weights; the deltas are its only parameters.

    The model is no submodule: it is neither trained, nor averaged, nor sent, and stays in evaluation mode.
    """

    base: nn.Module

    def __init__(self, base: nn.Module, deltas: Mapping[str, nn.Module]) -> None:
        super().__init__()
        frozen = copy.deepcopy(base).eval().requires_grad_(False)
        object.__setattr__(self, "base", frozen)
        self._names = list(deltas)
        self.deltas = nn.ModuleList(deltas.values())  # names of weights have dots, which names of modules cannot have

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = {
            name: delta(self.base.get_parameter(name)) for name, delta in zip(self._names, self.deltas, strict=True)
        }
        outputs: Tensor = functional_call(self.base, weights, inputs)
        return outputs


def train_deltas(
    task: Task, start: Adapted, federation: Federation, *, rounds: int, lr: float, cost: Cost
) -> tuple[Adapted, int]:
    """The model with deltas trained at `lr` times the federation's learning rate, and the number of their entries."""
    local = replace(task.recipe.local, lr=lr * task.recipe.lr)
    model = cast(Adapted, task.train(start, federation, rounds=rounds, cost=cost, what="FUSED", local=local))
    cost.storage_bytes = serialized_size(dict(model.named_parameters()), {})
    return model, sum(delta.numel() for delta in model.parameters())
