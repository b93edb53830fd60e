"""The data that a client answers from, in process and on a real node."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedup.federation import Client, named_rows
from fedup.models.features import FeatureReader
from fedup.request import Forget
from fedup.rng import sample
from fedup.targets import kind_of


@dataclass(frozen=True)
class ClientData:
    """The model in question, a client's own rows, and its own rules."""

    model: nn.Module
    x: Tensor
    y: Tensor
    client: Client  # its id and its rows
    num_classes: int
    ids: Tensor | None = None  # (N,) the sample ids of rows, if not their numbers
    subjects: Tensor | None = None  # (N,)
    subject_tags: Mapping[str, int] | None = None  # numbers of persons by tag; None: it knows no tags
    least_rows: int = 1  # fewest rows of a class to answer for
    few_rows: bool = True  # whether sums of fewer than five rows of a class may be sent
    readers: Mapping[str, FeatureReader] | None = None  # by cut, if shared

    @property
    def sample_ids(self) -> Tensor:
        """The sample ids of the training rows. (n,)"""
        rows = self.client.train
        return rows if self.ids is None else self.ids[rows]

    @property
    def targets(self) -> Tensor:
        """The targets of the training rows. (n,) or (n, K)"""
        return self.y[self.client.train]

    @property
    def cell_labels(self) -> Tensor:
        """By training row, the number of its cell: the class; with other targets `num_classes`, for all rows. (n,)"""
        rows = self.client.train
        return self.y[rows] if kind_of(self.y) == "classes" else torch.full_like(rows, self.num_classes)

    def without(self, finished: frozenset[int]) -> "ClientData":
        """The same without the rows of these classes; a label leaves no row out."""
        if not finished or kind_of(self.y) != "classes":
            return self
        client, request = self.client, Forget(class_ids=finished)
        parts = (client.train, client.validation, client.heldout)
        return replace(self, client=Client(client.id, *(named_rows(client, request, own, self.y)[1] for own in parts)))

    def some(self, rows: Tensor, most: int) -> Tensor:
        """Of these rows at most so many, to count answers to. A client that answers for groups of rows alone counts
        all of them: a sample would leave a small group beside it, or make one with the next sample."""
        return rows if self.least_rows > 1 else sample(rows, most, "tally", len(rows))

    def shared_reader(self, cut: str) -> FeatureReader | None:
        """The shared reader of features at a cut, if there is one."""
        return None if self.readers is None else self.readers[cut]
