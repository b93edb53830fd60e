"""A client that called every class by the next one's name, and is to be forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedup.bench.scenarios import Situation, target_client
from fedup.federation import Federation
from fedup.request import Forget
from fedup.tasks.datasets import Dataset, Images, Texts

_LEAST_HARM = 0.005  # of Retrain's R-A: an attack that costs less had no effect


@dataclass(frozen=True)
class Scenario:
    """`client` flips all its labels, y → y + 1, in all its parts; without one, the largest client does."""

    client: int | None = None

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The federation with one liar, who is to be forgotten."""
        liar = target_client(federation, self.client)
        rows, y = torch.cat([liar.train, liar.validation, liar.heldout]), federation.y.clone()
        y[rows] = (y[rows] + 1) % federation.num_classes
        story = f"Client {liar.id} called every class by the next one's name. Forget that client."
        return Situation(federation.relabeled(y), Forget.clients([liar.id], reason="poison"), story)

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        """Whether the liar cost retained accuracy."""
        with_liar, without = original["r_a"], retrained["r_a"]
        return with_liar is not None and without is not None and without - with_liar >= _LEAST_HARM
