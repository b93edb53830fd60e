"""Data sets, one file each: a function `load()` that returns a `Dataset`, how raw inputs become rows (`INPUT`), and
optionally the settings that suit it (`DEFAULTS`)."""

from types import ModuleType

from fedup.bench.datasets._dataset import Dataset, Defaults
from fedup.bench.datasets._inputs import Images, Texts
from fedup.registry import find

__all__ = ["Dataset", "Defaults", "Images", "Texts", "defaults_of", "input_of", "load_dataset"]


def load_dataset(name: str) -> Dataset:
    """The data set of that name.

    >>> load_dataset("digits").x.shape
    torch.Size([1437, 1, 28, 28])
    """
    loaded: Dataset = _find(name).load()
    return loaded


def defaults_of(name: str) -> Defaults:
    """The settings that suit the data set, which need not be there."""
    found: Defaults = getattr(_find(name), "DEFAULTS", Defaults())
    return found


def input_of(name: str) -> Images | Texts:
    """How raw images or texts become rows of the data set, which need not be there."""
    found: Images | Texts = _find(name).INPUT
    return found


def _find(name: str) -> ModuleType:
    return find(__name__, name, needs=("load", "INPUT"))
