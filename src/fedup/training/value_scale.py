"""Values are learned in units of their own deviation; the trained model answers in the user's units."""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from fedup.errors import CutError
from fedup.federation import Federation
from fedup.models.cut import find_cut, logits_of
from fedup.models.views import shared_view

_LEAST = 1e-6  # a deviation below this is none: the value is constant


@dataclass(frozen=True, eq=False)
class ValueScale:
    """The mean and deviation of each value over all training rows: what counts, sums and squares of clients give."""

    mean: Tensor  # (K,)
    deviation: Tensor  # (K,)
    layer: str  # the last one, which takes the scale over

    @classmethod
    def of(cls, federation: Federation, model: nn.Module) -> Self | None:
        """The scale, or None where the targets are no values or the model does not end in a linear layer."""
        if federation.targets != "values":
            return None
        values = federation.y[federation.rows("train")].double()
        mean, deviation = values.mean(0), values.std(0, correction=0)
        deviation = torch.where(deviation > _LEAST * (1 + mean.abs()), deviation, 1.0)
        try:
            made = cls(mean, deviation, find_cut(model))
        except CutError:
            return None
        return made if made._fits(model, federation.x[federation.rows("train")[:2]]) else None

    def standardized(self, y: Tensor) -> Tensor:
        """Values in units of their deviation, around 0."""
        return ((y.double() - self.mean.to(y.device)) / self.deviation.to(y.device)).to(y.dtype)

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Let the last layer give values in the user's units."""
        layer = model.get_submodule(self.layer)
        assert isinstance(layer, nn.Linear)
        mean, deviation = (part.to(layer.weight.device) for part in (self.mean, self.deviation))
        layer.weight.copy_(layer.weight.double() * deviation[:, None])
        layer.bias.copy_(layer.bias.double() * deviation + mean)

    @torch.no_grad()
    def take_from(self, model: nn.Module) -> None:
        """The reverse: let the last layer of a trained model give values in units of their deviation."""
        layer = model.get_submodule(self.layer)
        assert isinstance(layer, nn.Linear)
        mean, deviation = (part.to(layer.weight.device) for part in (self.mean, self.deviation))
        layer.weight.copy_(layer.weight.double() / deviation[:, None])
        layer.bias.copy_((layer.bias.double() - mean) / deviation)

    def _fits(self, model: nn.Module, rows: Tensor) -> bool:
        """Whether the last layer's outputs are the model's, so that its scale is the model's."""
        layer = model.get_submodule(self.layer)
        if not isinstance(layer, nn.Linear) or layer.bias is None or layer.out_features != len(self.mean):
            return False
        scaled = copy.deepcopy(model)
        self.put_into(scaled)
        with torch.no_grad():
            example = rows.to(layer.weight.device)
            before, after = (logits_of(shared_view(each)(example)).double() for each in (model, scaled))
        mean, deviation = (part.to(before.device) for part in (self.mean, self.deviation))
        return torch.allclose((after - mean) / deviation, before, atol=1e-3, rtol=1e-3)
