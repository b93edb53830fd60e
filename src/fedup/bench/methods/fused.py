"""FUSED (Zhong et al., CVPR 2025): a sparse delta on the layers that learn most, trained on what is retained."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedup.artifacts import serialized_size
from fedup.bench.cost import Cost
from fedup.bench.settings import later
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError
from fedup.history import History
from fedup.request import Forget
from fedup.rng import generator

GRID = {"lr": (1.0, 0.3), "rounds": (5, 10)}


@dataclass(frozen=True)
class Method:
    """The `layers` (a share of them) that clients changed most in training get a delta each: some entries, a share
    `density` drawn at random, or a product of two matrices of `rank`. Clients train the deltas alone, by FedAvg for
    `rounds` on what is retained at `lr` times the federation's learning rate, with everything else frozen, BatchNorm's
    statistics included: with those fixed, the full rate may be too high. Without the deltas the original model is back.
    """

    layers: float = 0.7
    density: float = 0.5
    delta: Literal["sparse", "lora"] = "sparse"
    rank: int = 16
    rounds: int = 5
    lr: float = later(1.0)

    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in (self.layers, self.density, self.lr)) or min(self.rank, self.rounds) < 1:
            raise SettingError(
                "layers, density and lr must lie in (0, 1], rank and rounds must be 1 or more; found "
                f"{self.layers}, {self.density}, {self.lr}, {self.rank}, {self.rounds}."
            )

    def supports(self, request: Forget) -> bool:
        """Any data can be left out."""
        return True

    def unlearn(self, task: Task) -> Unlearned:
        """The frozen model under trained deltas."""
        cost, history = Cost(), task.kept()
        with cost.stage("rank"):
            ranked = ranking(task.model, history)
            chosen = ranked[: max(1, round(self.layers * len(ranked)))]
            start = self.on(task.model, chosen, task.recipe.seed)
        retained = task.federation.without(task.request)
        local = replace(task.recipe.local, lr=self.lr * task.recipe.lr)
        trained = task.train(start, retained, rounds=self.rounds, cost=cost, what="FUSED", local=local)
        model = cast(Adapted, trained)
        deltas = sum(delta.numel() for delta in model.parameters())
        cost.storage_bytes = serialized_size(dict(model.named_parameters()), {})
        did = (
            f"deltas of {deltas:,} entries on {len(chosen)} of {len(ranked)} layers were trained for {self.rounds} "
            "rounds by the clients that hold retained data; the model under them is frozen"
        )
        return Unlearned(model, cost, restore=lambda: model.base, about={"did": did, "layers": chosen})

    def on(self, model: nn.Module, chosen: Sequence[str], seed: int) -> "Adapted":
        """The model under deltas that do nothing yet."""
        if self.delta == "lora":
            return Adapted(model, {name: LowRank(model.get_parameter(name), self.rank, seed, name) for name in chosen})
        return Adapted(model, {name: Sparse(model.get_parameter(name), self.density, seed, name) for name in chosen})


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
    """A delta of low rank, over a tensor's first dimension and all others."""

    def __init__(self, weight: Tensor, rank: int, seed: int, name: str) -> None:
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        rank = min(rank, rows, columns)
        random = torch.randn(rank, columns, generator=generator(seed, "lora", name)) / columns**0.5
        self.down = nn.Parameter(random.to(weight))
        self.up = nn.Parameter(torch.zeros(rows, rank, dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view(weight.shape)


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
