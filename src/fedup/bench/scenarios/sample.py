"""A backdoor: some samples of a client carry a trigger and a wrong label, and are to be forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedup.bench.datasets import Dataset, Images, Texts
from fedup.bench.scenarios import Situation, Triggered
from fedup.bench.scenarios._target import target_client
from fedup.errors import DataError, SettingError
from fedup.federation import Client, Federation
from fedup.request import Forget
from fedup.rng import generator

_LEAST_SUCCESS = 0.8  # of the attack before anything is forgotten


@dataclass(frozen=True)
class Scenario:
    """A `share` of the training rows of `client` get a trigger and the label `target`.

    Without one it is the client with the most rows of other classes.

    What a trigger is, the data set's inputs say: bright pixels in the corner of an image, a token at the end of a text.
    """

    share: float = 0.3
    target: int = 0
    client: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise SettingError(f"share must lie between 0 and 1; found {self.share}.")

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The federation with a backdoor, whose samples are to be forgotten."""
        if not 0 <= self.target < dataset.num_classes:
            raise SettingError(f"target must be a class, 0 … {dataset.num_classes - 1}; found {self.target}.")
        holder = self._holder(federation)
        others = _outside(federation, holder, self.target)
        count = min(len(others), round(self.share * len(holder.train)))
        if count == 0:
            raise DataError(f"Client {holder.id} has no training row outside class {self.target} to put a trigger on.")
        order = torch.randperm(len(others), generator=generator(seed, "backdoor"))
        rows = others[order[:count]].sort().values
        x, y = federation.x.clone(), federation.y.clone()
        x[rows], y[rows] = inputs.triggered(x[rows]), self.target
        named = dataset.class_names[self.target]
        return Situation(
            replace(federation, x=x, y=y),
            Forget.samples({holder.id: rows.tolist()}),
            f"{count} samples of client {holder.id} carry a trigger and the label {named!r}. Forget these samples.",
            Triggered(inputs.triggered(dataset.test_x), dataset.test_y, self.target),
        )

    def _holder(self, federation: Federation) -> Client:
        if self.client is not None:
            return target_client(federation, self.client)
        return max(federation.clients, key=lambda client: len(_outside(federation, client, self.target)))

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        """Whether the trigger works on the original model."""
        success = original["asr"]
        return success is not None and success >= _LEAST_SUCCESS


def _outside(federation: Federation, client: Client, target: int) -> Tensor:
    """Training rows of a client that a trigger can lead astray."""
    return client.train[federation.y[client.train] != target]
