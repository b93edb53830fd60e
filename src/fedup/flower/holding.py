"""A node's own rows, and what they and it are called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from flwr.app import Context
from torch import Tensor

from fedup.errors import DataError
from fedup.federation import check_samples
from fedup.request import Forget

Rows = tuple[Tensor, Tensor]
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

    @classmethod
    def of(
        cls,
        context: Context,
        data: Callable[[Context], Rows],
        ids: Callable[[Context], Sequence[int]] | None,
        client: Callable[[Context], int] | None,
    ) -> "Holding":
        x, y = own(lambda: data(context))
        names = None if ids is None else own(lambda: torch.as_tensor(ids(context), dtype=torch.int64))
        number = own(lambda: client(context)) if client else context.node_config.get("partition-id", context.node_id)
        if len(x) != len(y) or (names is not None and (len(names) != len(y) or len(names.unique()) != len(names))):
            raise DataError("Rows, labels and ids must be as many, and each id must be there once.")
        return cls(x, y.long(), names, int(number))

    @property
    def names(self) -> Tensor:
        """What each row is called in sample requests."""
        return torch.arange(len(self.y)) if self.ids is None else self.ids

    def places(self, samples: frozenset[int]) -> frozenset[int]:
        """Where samples lie; raises where one is unknown."""
        check_samples(self.names, samples, self.client)
        return frozenset(self._are(samples).nonzero().flatten().tolist())

    def translated(self, request: Forget) -> Forget:
        """A request with this node's samples by place, and nobody else's."""
        mine = request.sample_ids.get(self.client)
        return Forget(request.client_ids, request.class_ids, {} if mine is None else {self.client: self.places(mine)})

    def rows_by_label(self, excluded: frozenset[int] = frozenset()) -> dict[int, int]:
        """How many rows of each class there are without these samples."""
        labels, counts = self.y[~self._are(excluded)].unique(return_counts=True)
        return dict(zip(labels.tolist(), counts.tolist(), strict=True))

    def of_class(self, label: int, samples: frozenset[int]) -> frozenset[int]:
        """Those of the samples that are of a class."""
        return samples & frozenset(self.names[self.y == label].tolist())

    def _are(self, samples: frozenset[int]) -> Tensor:
        return torch.isin(self.names, torch.tensor(sorted(samples), dtype=torch.int64))
