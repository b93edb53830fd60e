"""A node's own rows, and what they and it are called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from flwr.app import Context
from torch import Tensor

from fedup.errors import DataError
from fedup.federation import check_samples
from fedup.flower.rows import Rows, rows_of
from fedup.request import Forget

T = TypeVar("T")


class OwnError(Exception):
    """The user's own code failed; what it said stays at the node."""


def own(call: Callable[[], T]) -> T:
    """The user's own code, whose failures are told by their kind alone."""
    try:
        return call()
    except Exception as error:
        raise OwnError(type(error).__name__) from error


@dataclass(frozen=True)
class Holding:
    """The rows a node trained on, their labels and names, and the node's number among clients."""

    x: Tensor
    y: Tensor
    ids: Tensor | None
    client: int

    @property
    def names(self) -> Tensor:
        """What each row is called in sample requests."""
        return torch.arange(len(self.y)) if self.ids is None else self.ids

    def on(self, device: torch.device) -> "Holding":
        """The same with its rows where the model is."""
        return replace(self, x=self.x.to(device))

    def places(self, samples: frozenset[int]) -> frozenset[int]:
        """Where samples lie; raises where one is unknown."""
        check_samples(self.names, samples, self.client)
        return self.known_places(samples)

    def known_places(self, samples: frozenset[int]) -> frozenset[int]:
        """Where those of the samples lie that are here; nobody is told of the others."""
        return frozenset(self._are(samples).nonzero().flatten().tolist())

    def translated(self, request: Forget) -> Forget:
        """A request with this node's samples by place, and nobody else's; raises where one is unknown."""
        check_samples(self.names, request.sample_ids.get(self.client, frozenset()), self.client)
        return self.translated_quietly(request)

    def translated_quietly(self, request: Forget) -> Forget:
        """The same, without a word of samples that are unknown."""
        mine = request.sample_ids.get(self.client)
        samples = {} if mine is None else {self.client: self.known_places(mine)}
        return Forget(request.client_ids, request.class_ids, samples)

    def rows_by_label(self, excluded: frozenset[int] = frozenset()) -> dict[int, int]:
        """How many rows of each class there are without these samples."""
        labels, counts = self.y[~self._are(excluded)].unique(return_counts=True)
        return dict(zip(labels.tolist(), counts.tolist(), strict=True))

    def of_class(self, label: int, samples: frozenset[int]) -> frozenset[int]:
        """Those of the samples that are of a class."""
        return samples & frozenset(self.names[self.y == label].tolist())

    def _are(self, samples: frozenset[int]) -> Tensor:
        return torch.isin(self.names, torch.tensor(sorted(samples), dtype=torch.int64))


@dataclass(frozen=True)
class Source:
    """The user's own functions; what they give is asked for when it is needed, once for each message."""

    context: Context
    data: Callable[[Context], Rows]
    ids: Callable[[Context], Sequence[int]] | None
    number: Callable[[Context], int] | None
    unseen: Callable[[Context], Rows] | None = None  # rows that were held out of training

    @cached_property
    def client(self) -> int:
        """The node's number among clients."""
        number = self.number
        if number is not None:
            return int(own(lambda: number(self.context)))
        return int(self.context.node_config.get("partition-id", self.context.node_id))

    @cached_property
    def holding(self) -> Holding:
        """Its rows, checked."""
        x, y, ids = self._read()
        if y.is_floating_point() and not torch.equal(y, y.round()):
            raise DataError("A label is no whole number.")
        return Holding(x, y.long(), ids, self.client)

    def held_out(self, like: Holding) -> tuple[Tensor, Tensor]:
        """Rows that the node did not train on, and their labels; none where it has not said which."""
        unseen = self.unseen
        if unseen is None:
            return like.x[:0], like.y[:0]
        x, y = rows_of(own(lambda: unseen(self.context)))
        if len(x) != len(y) or x.shape[1:] != like.x.shape[1:] or x.dtype != like.x.dtype:
            raise DataError("Held-out rows must be like those trained on, and have a label each.")
        return x, y.long()

    def holding_like(self, blank: Tensor | None) -> Holding:
        """The same for a release under differential privacy: rows are to be like the blank one, and a label that is no
        whole number is one that no class has."""
        x, y, ids = self._read(blank)
        if blank is not None and (x.shape[1:] != blank.shape[1:] or x.dtype != blank.dtype):
            raise DataError("Rows are of another shape or type than the question says.")
        whole = (y == y.round()) & (y.abs() < 2**31) if y.is_floating_point() else torch.ones_like(y, dtype=torch.bool)
        return Holding(x, torch.where(whole, y, -1).long(), ids, self.client)

    def _read(self, blank: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        x, y = rows_of(own(lambda: self.data(self.context)), blank=blank)
        name = self.ids
        ids = None if name is None else own(lambda: torch.as_tensor(name(self.context), dtype=torch.int64))
        if len(x) != len(y) or (ids is not None and (len(ids) != len(y) or len(ids.unique()) != len(ids))):
            raise DataError("Rows, labels and ids must be as many, and each id must be there once.")
        return x, y, ids
