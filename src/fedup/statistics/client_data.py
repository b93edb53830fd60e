"""The data that a client answers from, in process and on a real node."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedup.federation import Client
from fedup.models.features import FeatureReader


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
    least_rows: int = 1  # fewest rows of a class to answer for
    few_rows: bool = True  # whether sums of fewer than five rows of a class may be sent
    readers: Mapping[str, FeatureReader] | None = None  # by cut, if shared

    @property
    def sample_ids(self) -> Tensor:
        """The sample ids of the training rows. (n,)"""
        rows = self.client.train
        return rows if self.ids is None else self.ids[rows]

    def shared_reader(self, cut: str) -> FeatureReader | None:
        """The shared reader of features at a cut, if there is one."""
        return None if self.readers is None else self.readers[cut]
