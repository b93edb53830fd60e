"""Single samples of one client, drawn at random, that are withdrawn."""

from dataclasses import dataclass

import torch

from fedup.bench.scenarios import NoAttack, Situation, SomeSamples
from fedup.federation import Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.datasets import Dataset, Images, Texts


@dataclass(frozen=True)
class Scenario(SomeSamples, NoAttack):
    """Forget a `share` of the training rows of `client`; without one, of the largest."""

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The honest federation, which is to forget the samples."""
        holder, count = self.chosen(federation)
        order = torch.randperm(len(holder.train), generator=generator(seed, "random samples"))
        request = Forget.samples({holder.id: holder.train[order[:count]].tolist()})
        return Situation(federation, request, f"{count} random samples of client {holder.id} were withdrawn.")
