"""FedEraser (Liu et al., IWQoS 2021): the stored updates of the others, in directions that they compute anew."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedup.artifacts import serialized_size
from fedup.bench.cost import Cost
from fedup.bench.history import History
from fedup.bench.task import Task, Unlearned
from fedup.errors import SettingError
from fedup.request import Forget
from fedup.training.averaging import RunningAverage, Weights, weights_of

GRID = {"norm": ("whole", "layer"), "post_rounds": (0, 2)}


@dataclass(frozen=True)
class Method:
    """The server keeps every client's update of each `every`-th round. On a request it starts from the first weights,
    applies the first stored round without the target, and goes through the others: each remaining client trains for a
    `ratio` of its epochs, and its update is given the length of the stored one; of the whole vector, as in the paper,
    or of each layer's, as in its code. Then `post_rounds` of FedAvg.
    """

    every: int = 2
    ratio: float = 0.5
    norm: Literal["whole", "layer"] = "whole"
    post_rounds: int = 0

    needs_history: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.norm not in ("whole", "layer"):
            raise SettingError(f"norm must be 'whole' or 'layer'; found {self.norm!r}.")
        if self.every < 1 or not 0 < self.ratio <= 1 or self.post_rounds < 0:
            raise SettingError(
                f"every must be 1 or more, ratio in (0, 1], post_rounds 0 or more; found {self.every}, {self.ratio}, "
                f"{self.post_rounds}."
            )

    def supports(self, request: Forget) -> bool:
        """Whole clients only: stored updates cannot be had without some of their rows."""
        return request.kind == "client"

    def unlearn(self, task: Task) -> Unlearned:
        """A model rebuilt from the updates of those who stay."""
        cost, history, recipe = Cost(), task.kept(), task.recipe
        stored = history.rounds[:: self.every]
        update = {name: tensor for name, tensor in weights_of(task.start).items() if tensor.is_floating_point()}
        cost.storage_bytes = serialized_size(update, {}) * sum(len(history.shares(number)) for number in stored)
        model = copy.deepcopy(task.start)
        with cost.stage("apply"):
            apply_without(model, history, stored[0], task.request.client_ids)
        local = replace(recipe.local, epochs=math.ceil(self.ratio * recipe.epochs))
        parameters = [name for name, _ in model.named_parameters()]
        averaging = partial(CalibratedAverage, history=history, parameters=parameters, by_layer=self.norm == "layer")
        model = task.train(
            model, task.retained, rounds=stored[1:], cost=cost, what="FedEraser", local=local, averaging=averaging
        )
        if self.post_rounds:
            model = task.train_after(model, rounds=self.post_rounds, cost=cost, what="FedEraser, rounds after")
        did = (
            f"{len(stored)} of {len(history.rounds)} rounds were stored; the clients that stay calibrated "
            f"{len(stored) - 1} of them ({'the whole update' if self.norm == 'whole' else 'each layer'} at its stored "
            f"length), and {self.post_rounds} rounds followed"
        )
        return Unlearned(model, cost, about={"did": did, "stored_rounds": list(stored)})


def apply_without(model: nn.Module, history: History, number: int, gone: Iterable[int]) -> None:
    """Apply one stored round, averaged over the clients that stay."""
    shares = {client: share for client, share in history.shares(number).items() if client not in set(gone)}
    live = weights_of(model)
    average, total = RunningAverage(live), sum(shares.values())
    for client, share in shares.items():
        upload = {name: tensor.to(live[name].device) for name, tensor in history.upload(number, client).items()}
        average.add(upload, share / total)
    average.finish()
    average.load(live)


class CalibratedAverage(RunningAverage):
    """Averages updates that have the length of the stored ones and the direction of the new ones.

    Buffers are averaged as they are: they are no steps of gradient descent.
    """

    def __init__(self, start: Weights, *, history: History, parameters: Iterable[str], by_layer: bool) -> None:
        super().__init__(start)
        self._history, self._parameters, self._by_layer = history, list(parameters), by_layer

    def add(self, weights: Weights, share: float, *, round_index: int = 0, client: int = 0) -> None:
        stored = self._history.update(round_index, client)
        fresh = {name: weights[name] - self.current[name] for name in self._parameters}
        steps = calibrated(fresh, {name: stored[name] for name in self._parameters}, by_layer=self._by_layer)
        super().add({**weights, **{name: self.current[name] + step for name, step in steps.items()}}, share)


def calibrated(fresh: Mapping[str, Tensor], stored: Mapping[str, Tensor], *, by_layer: bool) -> dict[str, Tensor]:
    """The fresh update, scaled to the length of the stored one; a zero update stays zero."""
    new, old = _lengths(fresh), _lengths(stored).to(next(iter(fresh.values())).device)
    if not by_layer:
        new, old = new.norm().expand_as(new), old.norm().expand_as(old)
    factors = torch.where(new > 0, old / new, 0.0)  # in double precision: a tiny update has a huge one
    return {name: (fresh[name].double() * f).to(fresh[name].dtype) for name, f in zip(fresh, factors, strict=True)}


def _lengths(update: Mapping[str, Tensor]) -> Tensor:
    """The l2 norm of each tensor, in double precision. (tensors,)"""
    return torch.stack([tensor.double().norm() for tensor in update.values()])
