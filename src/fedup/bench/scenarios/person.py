"""A person's few samples, which resemble each other, and are withdrawn."""

from dataclasses import dataclass

import torch

from fedup.bench.scenarios import NoAttack, Situation, target_client
from fedup.errors import SettingError
from fedup.federation import Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.datasets import Dataset, Images, Texts


@dataclass(frozen=True)
class Scenario(NoAttack):
    """Forget a person at `client` (without one, at the largest): `fewest` to `most` training rows, as the seed says.

    The person's rows are a random row and those nearest to it, at most half of the client's.
    """

    fewest: int = 5
    most: int = 30
    client: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise SettingError(f"fewest must lie in 1 … most; found {self.fewest} and {self.most}.")

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The honest federation, which is to forget the person."""
        holder, draw = target_client(federation, self.client), generator(seed, "person")
        wanted = int(torch.randint(self.fewest, self.most + 1, (), generator=draw))
        count = max(1, min(wanted, len(holder.train) // 2))
        plain = inputs.plain(federation.x[holder.train]).double()
        first = int(torch.randint(len(plain), (), generator=draw))
        nearest = (plain - plain[first]).square().sum(1).argsort(stable=True)[:count]
        request = Forget.samples({holder.id: holder.train[nearest].sort().values.tolist()})
        return Situation(federation, request, f"{count} samples of a person at client {holder.id} were withdrawn.")
