"""Data sets, one file each: a function `load()` that returns a `Dataset`."""

from fedup.bench.datasets._dataset import Dataset
from fedup.registry import find


def load_dataset(name: str) -> Dataset:
    """The data set of that name.

    >>> load_dataset("digits").x.shape
    torch.Size([1437, 1, 28, 28])
    """
    loaded: Dataset = find(__name__, name).load()
    return loaded
