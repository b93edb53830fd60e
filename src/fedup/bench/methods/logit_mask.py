"""Control: the logits of forgotten classes are struck out, at no cost."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedup.bench.cost import Cost
from fedup.bench.task import Task, Unlearned
from fedup.models.cut import logits_of
from fedup.request import Forget


class _Masked(nn.Module):
    def __init__(self, model: nn.Module, classes: frozenset[int]) -> None:
        super().__init__()
        self.model = model
        self.classes = sorted(classes)

    def forward(self, x: Tensor) -> Tensor:
        logits = logits_of(self.model(x)).clone()
        logits[:, self.classes] = -torch.inf
        return logits


@dataclass(frozen=True)
class Method:
    """Never answers with a forgotten class."""

    def supports(self, request: Forget) -> bool:
        """Clients and samples have no logit of their own."""
        return bool(request.class_ids) and not request.client_ids and not request.sample_ids

    def unlearn(self, task: Task) -> Unlearned:
        """The original model behind a mask."""
        cost = Cost()
        with cost.stage("mask"):
            masked = _Masked(task.model, task.request.class_ids).eval()
        did = "the logits of forgotten classes are struck out; the model behind them is the original"
        return Unlearned(masked, cost, restore=lambda: masked.model, about={"did": did})
