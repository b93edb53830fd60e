"""What a user's `data(context)` may give, as rows and labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fedup.errors import DataError

Rows = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
_LABELS = torch.iinfo(torch.int64)


def rows_of(given: Rows, *, blank: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A pair of tensors as it is; a data set, or that of a loader, item by item in its own order.

    Items are (row, label), or mappings with two entries, of which one is a whole number in each of them: the label.
    Errors tell nothing of what an item holds, nor what the user's own code says: a node sends their text. No items are
    an error, unless a `blank` row says what they would look like.

    >>> x, y = rows_of([{"img": torch.ones(2), "label": 3}, {"img": torch.zeros(2), "label": 1}])
    >>> x.shape, y
    (torch.Size([2, 2]), tensor([3, 1]))
    """
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(one, Tensor) for one in given):
        return given[0], given[1]
    items = _items(_dataset(given))
    if not items:
        if blank is None:
            raise DataError("The data set is empty.")
        return blank[:0], torch.empty(0, dtype=torch.int64)
    label = _label_of(items)
    row = next(key for key in _keys(items[0]) if key != label)
    rows, labels = [_tensor(item[row]) for item in items], [_whole(item[label]) for item in items]
    if None in labels:
        raise DataError("A label in the data set is no whole number.")
    if len({(one.shape, one.dtype) for one in rows}) > 1:
        raise DataError("Rows of the data set differ in shape or type: give them one of each.")
    x = torch.stack(rows)
    return x, torch.tensor(labels, dtype=torch.int64, device=x.device)


def _dataset(given: Any) -> Any:
    """What has items by number: for one of Hugging Face, too, which is no `torch.utils.data.Dataset`."""
    if isinstance(given, DataLoader):
        samplers = given.sampler, getattr(given.batch_sampler, "sampler", None)
        if any(isinstance(one, SubsetRandomSampler | DistributedSampler) for one in samplers):
            raise DataError("The loader reads a part of its data set only: give it a torch.utils.data.Subset instead.")
        given = given.dataset
    numbered = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not numbered or isinstance(given, IterableDataset | Mapping | tuple):
        raise DataError(
            "data(context) must give a pair of tensors, or a Dataset or DataLoader whose items have numbers; found "
            f"{type(given).__name__}."
        )
    return given


def _items(dataset: Any) -> Sequence[Any]:
    """All of them; one that cannot be read is told by the kind of its failure."""
    try:
        items = [dataset[number] for number in range(len(dataset))]
    except Exception as error:
        raise DataError(f"The data set's own code failed: {type(error).__name__}.") from error
    if any(not isinstance(item, tuple | list | Mapping) or len(item) != 2 for item in items):
        raise DataError("Items of the data set must be (row, label), or mappings with two entries: one is not.")
    if len({frozenset(_keys(item)) for item in items}) > 1:
        raise DataError("Items of the data set have different entries.")
    return items


def _keys(item: Any) -> Sequence[Any]:
    return list(item) if isinstance(item, Mapping) else (0, 1)


def _label_of(items: Sequence[Any]) -> Any:
    """Which entry is the label: a tuple's second; a mapping's only one that is a whole number all through."""
    if not isinstance(items[0], Mapping):
        return 1
    whole = [key for key in items[0] if all(_whole(item[key]) is not None for item in items)]
    if len(whole) != 1:
        raise DataError(
            "Exactly one of two entries must be a whole number in every item, the label; found "
            f"{'both' if whole else 'neither'}. Give tuples (row, label)."
        )
    return whole[0]


def _whole(value: Any) -> int | None:
    """The whole number that a value is, alone in an array or not; None if it is none."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        single = value.numel() == 1 if isinstance(value, Tensor) else value.size == 1
        value = value.item() if single else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and _LABELS.min <= value <= _LABELS.max else None


def _tensor(row: Any) -> Tensor:
    """An image that no transform made a tensor of could have its axes in any order: it is no row."""
    if not isinstance(row, Tensor | np.ndarray):
        raise DataError(f"Rows of the data set must be tensors or arrays; found {type(row).__name__}.")
    try:
        return torch.as_tensor(row).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError("Rows of the data set must be of numbers.") from error
