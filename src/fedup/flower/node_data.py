"""A node's own rows, and what they and it are called."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedup.errors import DataError
from fedup.federation import check_samples
from fedup.flower.rows import Rows, rows_of
from fedup.request import Forget

T = TypeVar("T")


class OwnError(Exception):
    """The user's own code failed; what it said stays at the node."""


def own(function: Callable[..., T], *arguments: Context) -> T:
    """What the user's own code gives; its failures are told by their kind alone."""
    try:
        return function(*arguments)
    except Exception as error:
        raise OwnError(type(error).__name__) from error


@dataclass(frozen=True)
class NodeData:
    """The rows a node trained on, their labels and names, and the node's number among clients."""

    x: Tensor
    y: Tensor
    ids: Tensor | None
    client: int

    def places(self, samples: frozenset[int], *, quietly: bool = False) -> frozenset[int]:
        """Where samples lie; raises where one is unknown, unless it is done quietly: then nobody is told of those."""
        names = torch.arange(len(self.y)) if self.ids is None else self.ids
        if not quietly:
            check_samples(names, samples, self.client)
        wanted = torch.tensor(sorted(samples), dtype=torch.int64)
        return frozenset(torch.isin(names, wanted).nonzero().flatten().tolist())

    def translated(self, request: Forget, *, quietly: bool = False) -> Forget:
        """A request with this node's samples by place, and nobody else's."""
        mine = request.sample_ids.get(self.client)
        samples = {} if mine is None else {self.client: self.places(mine, quietly=quietly)}
        return Forget(request.client_ids, request.class_ids, samples)


@dataclass(frozen=True)
class Source:
    """The user's own functions; what they give is asked for when it is needed."""

    context: Context
    rows: Callable[[Context], Rows]
    model: Callable[[], nn.Module]
    ids: Callable[[Context], Sequence[int]] | None = None
    number: Callable[[Context], int] | None = None
    unseen: Callable[[Context], Rows] | None = None  # rows that were held out of training

    @cached_property
    def client(self) -> int:
        """The node's number among clients."""
        if self.number is not None:
            return int(own(self.number, self.context))
        return int(self.context.node_config.get("partition-id", self.context.node_id))

    def node_data(self, *, like: Tensor | None = None) -> NodeData:
        """Its rows, checked. For a release under differential privacy they are to be `like` a blank row, may be none,
        and a label that is no whole number is one that no class has."""
        x, y = rows_of(own(self.rows, self.context), blank=like)
        names = self.ids
        ids = None if names is None else own(lambda: torch.as_tensor(names(self.context), dtype=torch.int64))
        if len(x) != len(y) or (ids is not None and (len(ids) != len(y) or len(ids.unique()) != len(ids))):
            raise DataError("Rows, labels and ids must be as many, and each id must be there once.")
        if like is not None and (x.shape[1:] != like.shape[1:] or x.dtype != like.dtype):
            raise DataError("Rows are of another shape or type than the question says.")
        whole = (y == y.round()) & (y.abs() < 2**31) if y.is_floating_point() else torch.ones_like(y, dtype=torch.bool)
        if like is None and not bool(whole.all()):
            raise DataError("A label is no whole number.")
        return NodeData(x, torch.where(whole, y, -1).long(), ids, self.client)

    def held_out(self, like: NodeData) -> tuple[Tensor, Tensor]:
        """Rows that the node did not train on, and their labels; none where it has not said which."""
        if self.unseen is None:
            return like.x[:0], like.y[:0]
        x, y = rows_of(own(self.unseen, self.context))
        if len(x) != len(y) or x.shape[1:] != like.x.shape[1:] or x.dtype != like.x.dtype:
            raise DataError("Held-out rows must be like those trained on, and have a label each.")
        return x, y.long()
