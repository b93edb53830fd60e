"""What a server knows before answers come: shapes of features, from its model and one blank row."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedup.filters.delta import ChangedWeight, changed_weights
from fedup.models.cut import flat_tail
from fedup.models.features import FeatureReader, Features
from fedup.models.layout import Granularity, to_positions
from fedup.models.views import shared_view
from fedup.privacy.dp import Layout
from fedup.privacy.guarantee import DP
from fedup.privacy.projection import basis_of
from fedup.targets import Targets


class ModelFacts:
    """Shapes of a model's features; `example` is one blank row of its inputs."""

    def __init__(self, model: nn.Module, example: Tensor, num_classes: int) -> None:
        self._model, self._example, self.num_classes = model, example[:1], num_classes
        self.targets: Targets = "classes"
        self._first = torch.arange(1, device=example.device)
        self._features: dict[str, Features] = {}
        self._tails: dict[str, Callable[[Tensor], Tensor]] = {}
        self._widths: dict[tuple[str, DP], int] = {}
        self._layouts: dict[tuple[tuple[str, Granularity], ...], dict[str, tuple[int, int]]] = {}

    @property
    def num_cells(self) -> int:
        """How many numbers cells can have: classes, or with other targets outputs, and one for all rows."""
        return self.num_classes + (self.targets != "classes")

    def features(self, cut: str) -> Features:
        """Features of the blank row at a cut: their shape, and whether they can be negative."""
        if cut not in self._features:
            self._features[cut] = FeatureReader(self._model, cut).read(self._example, self._first)
        return self._features[cut]

    @torch.no_grad()
    def answers(self, cut: str, features: Tensor) -> Tensor:
        """The classes that the model answers to features at a cut; -1 where it scores all alike, as a blank head does.
        (N,)"""
        if cut not in self._tails:
            self._tails[cut] = flat_tail(shared_view(self._model, frozen=True), cut, self.features(cut).shape)
        scores = self._tails[cut](features.to(self._example.device))
        return torch.where(scores.amax(1) > scores.amin(1), scores.argmax(1), -1).cpu()

    def projected(self, cut: str, dp: DP) -> int:
        """Numbers of a row's features at a cut once they are projected under a guarantee."""
        if (cut, dp) not in self._widths:
            width = math.prod(self.features(cut).shape)
            basis = basis_of(self._model, cut, width, how=dp.projection, dims=dp.dims, num_classes=self.num_classes)
            self._widths[cut, dp] = basis.shape[1]
        return self._widths[cut, dp]

    def width(self, cut: str, dp: DP) -> int:
        """The length of a class's vector at a cut under a guarantee."""
        return Layout.of(dp, self.projected(cut, dp), self.num_classes).size

    def layouts(self, cuts: Mapping[str, Granularity]) -> dict[str, tuple[int, int]]:
        """Positions and channels at each cut."""
        wanted = tuple(cuts.items())
        if wanted not in self._layouts:
            (batch,) = FeatureReader(self._model, *cuts).batches(self._example, self._first)
            shapes = {cut: to_positions(batch[cut], over).shape for cut, over in wanted}
            self._layouts[wanted] = {cut: (shape[1], shape[2]) for cut, shape in shapes.items()}
        return self._layouts[wanted]

    def changed_weights(self, cut: str) -> tuple[ChangedWeight, ...]:
        """The weights that a delta changes."""
        return changed_weights(self._model, cut)

    @torch.no_grad()
    def relative_change(self, cut: str, changes: Mapping[str, Tensor]) -> float:
        """The length of a change of weights, in lengths of the weights themselves."""
        pairs = [
            (weight.whole(changes[weight.name].cpu()), self._model.get_parameter(weight.name).cpu())
            for weight in self.changed_weights(cut)
        ]
        lengths = [
            math.sqrt(sum(float(part.double().square().sum()) for part in parts)) for parts in zip(*pairs, strict=True)
        ]
        return lengths[0] / max(lengths[1], 1e-12)
