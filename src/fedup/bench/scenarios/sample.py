"""A backdoor: some samples of a client carry a trigger and a wrong label, and are to be forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedup.bench.scenarios import Situation, Triggered, target_client
from fedup.bench.settings import later
from fedup.errors import DataError, SettingError
from fedup.federation import Client, Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.tasks.datasets import Dataset, Images, Texts

_LEAST_SUCCESS = 0.8  # of the attack before anything is forgotten


@dataclass(frozen=True)
class Scenario:
    """A `share` of the training rows of some clients get a trigger and the label `target`.

    The clients are those in `clients`, or the `holders` with the most rows of other classes: one alone is not always
    heard. What a `trigger` is, the data set's inputs say: a patch, a blended pattern or a pixel on an image, a word at
    the end of a text; the first of them where none is named.
    """

    share: float = 0.3
    target: int = 0
    holders: int = 2
    clients: tuple[int, ...] = ()
    trigger: str | None = later(None)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.holders < 1:
            raise SettingError(
                f"share must lie between 0 and 1, holders must be 1 or more; found {self.share} and {self.holders}."
            )

    def prepare(self, federation: Federation, *, dataset: Dataset, inputs: Images | Texts, seed: int) -> Situation:
        """The federation with a backdoor, whose samples are to be forgotten."""
        if not 0 <= self.target < dataset.num_classes:
            raise SettingError(f"target must be a class, 0 … {dataset.num_classes - 1}; found {self.target}.")
        found = {client.id: self._marked(federation, client, seed) for client in self._chosen(federation)}
        marked = {client: ids for client, ids in found.items() if len(ids)}
        if not marked:
            raise DataError(f"No client has a training row outside class {self.target} to put a trigger on.")
        rows = torch.cat(list(marked.values()))
        x, y = federation.x.clone(), federation.y.clone()
        x[rows], y[rows] = inputs.triggered(x[rows], self.trigger), self.target
        story = (
            f"{len(rows)} samples of {'client' if len(marked) == 1 else 'clients'} {' and '.join(map(str, marked))} "
            f"carry a trigger and the label {dataset.class_names[self.target]!r}. Forget these samples."
        )
        request = Forget.samples({client: ids.tolist() for client, ids in marked.items()}, reason="poison")
        triggered = Triggered(inputs.triggered(dataset.test_x, self.trigger), dataset.test_y, self.target)
        return Situation(replace(federation, x=x, y=y), request, story, triggered)

    def took(self, original: Mapping[str, float | None], retrained: Mapping[str, float | None]) -> bool:
        """Whether the trigger works on the original model."""
        success = original["asr"]
        return success is not None and success >= _LEAST_SUCCESS

    def _chosen(self, federation: Federation) -> list[Client]:
        if self.clients:
            return [target_client(federation, client) for client in self.clients]
        if self.holders > len(federation.clients):
            raise SettingError(f"holders: there are {len(federation.clients)} clients; found {self.holders}.")
        by_rows = sorted(federation.clients, key=lambda client: -len(_outside(federation, client, self.target)))
        return by_rows[: self.holders]

    def _marked(self, federation: Federation, client: Client, seed: int) -> Tensor:
        """The rows of a client that get the trigger."""
        others = _outside(federation, client, self.target)
        count = min(len(others), max(1, round(self.share * len(client.train))))
        order = torch.randperm(len(others), generator=generator(seed, "backdoor", client.id))
        return others[order[:count].to(others.device)].sort().values


def _outside(federation: Federation, client: Client, target: int) -> Tensor:
    """Training rows of a client outside the target class."""
    return client.train[federation.y[client.train] != target]
