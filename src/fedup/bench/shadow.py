"""The attacker's shadow model: trained as Retrain is, on held-out rows, which no other training uses."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedup.bench.scenarios import Situation
from fedup.bench.training_cache import trained
from fedup.federation import Client, Federation
from fedup.request import Forget
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import predict
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe


def held_out_federation(federation: Federation, request: Forget) -> Federation:
    """The same clients, each training on its held-out rows of what is retained."""
    kept = federation.without(request)
    clients = tuple(Client(c.id, c.heldout, c.validation[:0], c.heldout[:0]) for c in kept.clients)
    return replace(federation, clients=clients)


@dataclass(frozen=True, eq=False)
class Shadow:
    """One shadow model for a group, trained when first needed."""

    situation: Situation
    dataset: Dataset
    recipe: Recipe
    progress: Progress

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """Its raw outputs on rows to be forgotten and on retained rows, none of them a training row of the federation.

        Samples have no held-out rows: test rows with their trigger stand for them.
        """
        federation, request = self.situation.federation, self.situation.request
        start = self.recipe.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)
        parts = start, held_out_federation(federation, request), self.recipe
        model = trained(*parts, progress=self.progress, what="the shadow model")
        retained = predict(model, federation.x, federation.retained(request, "heldout"))
        triggered, rows = self.situation.triggered, federation.forgotten(request, "heldout")
        if triggered is not None and not len(rows):
            return predict(model, triggered.x[triggered.y != triggered.target]), retained
        return predict(model, federation.x, rows) if len(rows) else torch.empty(0, retained.shape[1]), retained
