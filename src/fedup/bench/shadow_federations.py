"""Shadow federations: what a model of the same kind says of a row that it did, or did not, train on.

A membership attack has to know how hard each row is by itself (Watson et al. 2022; Carlini et al. 2022). Each shadow
federation trains as the attacked one did, from other first weights, on a random half of all rows, held-out rows
included. They come in pairs that share no row, so every row is inside one half of them and outside the other half:
forgotten and unseen rows are treated alike.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedup.bench.scenarios import Situation
from fedup.bench.training_cache import trained
from fedup.errors import SettingError
from fedup.federation import Client, Federation
from fedup.rng import generator, seed_for
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import predict
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe

_LARGEST = 50.0  # of a confidence: a removed logit is −∞


class Calibration(NamedTuple):
    """How sure shadow models are of each row's label: means of those with the row, and of those without. (N,) each"""

    inside: Tensor
    outside: Tensor


def check_count(count: int) -> int:
    """The number of shadow federations, if it makes pairs."""
    if count < 4 or count % 2:
        raise SettingError(f"shadow_federations must be an even number, 4 or more, or 0; found {count}.")
    return count


def halves(federation: Federation, seed: int, pair: int) -> tuple[Federation, Federation]:
    """The same clients twice; each trains on a random half of its training and held-out rows, without overlap."""
    parts: tuple[list[Client], list[Client]] = ([], [])
    for client in federation.clients:
        rows = torch.cat([client.train, client.heldout]).sort().values
        order = torch.randperm(len(rows), generator=generator(seed, "shadow federations", pair, client.id))
        first, second = rows[order.to(rows.device)].tensor_split(2)
        none = client.validation[:0]
        for half, chosen in zip(parts, (first, second), strict=True):
            half.append(Client(client.id, chosen.sort().values, none, none))
    one, other = (replace(federation, clients=tuple(half)) for half in parts)
    return one, other


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """log p / (1 − p) of the label: nearly normal over models, and fine where p is close to 1. (N,)"""
    logits = logits.double()
    own = torch.nn.functional.one_hot(labels.long(), logits.shape[1]).bool()
    others = logits.masked_fill(own, -torch.inf).logsumexp(1)
    return (logits[own] - others).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)


@dataclass(frozen=True, eq=False)
class ShadowFederations:
    """`count` shadow federations of one situation, an even number, trained when first needed and kept in the cache.

    The key in the cache is their content, so scenarios that leave the data as they are share them.
    """

    situation: Situation
    dataset: Dataset
    recipe: Recipe
    progress: Progress
    count: int
    _sums: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_count(self.count)

    def calibration(self, rows: Tensor) -> Calibration:
        """Means over the shadow federations for training and held-out rows, by row number."""
        if not self._sums:
            self._sums.append(self._confidences())
        return Calibration(*(self._sums[0][:, rows.to(self._sums[0].device)] / (self.count // 2)))

    def _confidences(self) -> Tensor:
        """Summed over shadow models with the row, and without it; zero for rows that no shadow federation may use."""
        federation = self.situation.federation
        rows = torch.cat([federation.rows("train"), federation.rows("heldout")])
        sums = torch.zeros(2, len(federation.y), dtype=torch.float64, device=federation.y.device)
        for number in range(self.count):
            half = halves(federation, self.recipe.seed, number // 2)[number % 2]
            recipe = replace(self.recipe, seed=seed_for(self.recipe.seed, "shadow federation", number))
            start = recipe.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)
            name = f"shadow federation {number + 1} of {self.count}"
            model = trained(start, half, recipe, progress=self.progress, what=name)
            outside = (~torch.isin(rows, half.rows())).long()
            sums[outside, rows] += confidence(predict(model, federation.x, rows), federation.y[rows])
        return sums
