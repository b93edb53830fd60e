"""Samples of one client that a model can know from memory only, and that are withdrawn."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedup.bench.scenarios import Situation, SomeSamples
from fedup.federation import Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.datasets import Dataset, Images, Texts

_LEAST_GAP = 0.02  # of accuracy on the forgotten rows between the original and Retrain: less was not memory
_RIDGE = 1e-2


@dataclass(frozen=True)
class Scenario(SomeSamples):
    """Forget the `share` of the training rows of `client` (without one, of the largest) that fit their label least.

    Each half of all training rows is judged by a linear model of the other half: rows whose label it finds least
    likely are those that no model learns from others (after Feldman 2020).
    """

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The honest federation, which is to forget the samples."""
        holder, count = self.chosen(federation)
        rows = federation.rows()
        margins = _margins(inputs.plain(federation.x[rows]), federation.y[rows], federation.num_classes, seed)
        own = torch.isin(rows, holder.train).nonzero().flatten()
        hardest = own[margins[own].argsort(stable=True)[:count]]
        request = Forget.samples({holder.id: rows[hardest].tolist()})
        story = f"{count} samples of client {holder.id} that fit their label least were withdrawn."
        return Situation(federation, request, story)

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        """Whether the original model knew them better than one that never saw them."""
        known, without = original["f_a_train"], retrained["f_a_train"]
        return known is not None and without is not None and known - without >= _LEAST_GAP


def _margins(x: Tensor, y: Tensor, num_classes: int, seed: int) -> Tensor:
    """How far a linear model of the other half puts each row's own label above all others. (N,)"""
    half = torch.randperm(len(y), generator=generator(seed, "memorised")).to(y.device) % 2
    margins = torch.empty(len(y), device=x.device)
    for part in (0, 1):
        scores = _scores(x[half != part], y[half != part], x[half == part], num_classes)
        own = one_hot(y[half == part].long(), num_classes).bool()
        margins[half == part] = scores[own] - scores.masked_fill(own, -torch.inf).amax(1)
    return margins


def _scores(x: Tensor, y: Tensor, unseen: Tensor, num_classes: int) -> Tensor:
    """Ridge regression of the classes, in closed form."""
    mean, scale = x.mean(0), x.std() + 1e-6
    table, wanted = (x - mean) / scale, one_hot(y.long(), num_classes).to(x) - 1 / num_classes
    gram = table.T @ table / len(x)
    gram.diagonal().add_(_RIDGE)
    return (unseen - mean) / scale @ torch.linalg.solve(gram, table.T @ wanted / len(x))
