"""What a client answers from: the same in process and on a real node."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedup.federation import Client
from fedup.models.features import FeatureReader


@dataclass(frozen=True)
class ClientData:
    """The model that is asked about, a client's own rows, and its own rules."""

    model: nn.Module
    x: Tensor
    y: Tensor
    client: Client  # its number, and which rows are its own
    num_classes: int
    ids: Tensor | None = None  # (N,) what rows are called in requests, where that is not their number
    subjects: Tensor | None = None  # (N,)
    least_rows: int = 1  # of a class that anything is told of
    readers: Mapping[str, FeatureReader] | None = None  # by cut, where they are shared

    @property
    def sample_ids(self) -> Tensor:
        """What the rows trained on are called in requests. (n,)"""
        rows = self.client.train
        return rows if self.ids is None else self.ids[rows]

    def shared_reader(self, cut: str) -> FeatureReader | None:
        """One of features at a cut that others use as well, if there is one."""
        return None if self.readers is None else self.readers[cut]
