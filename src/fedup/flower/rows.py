"""Rows and labels from whatever a user's `data(context)` returns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fedup.errors import DataError
from fedup.targets import Targets

Rows = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]
_LABELS = torch.iinfo(torch.int64)


def rows_of(given: Rows, *, blank: Tensor | None = None, targets: Targets = "classes") -> tuple[Tensor, Tensor]:
    """A pair of tensors unchanged; a data set, or that of a loader, item by item in order.

    Items are (row, label), or mappings with two entries of which exactly one, the label, is always a whole number.
    With other `targets` than classes items are (row, targets), and targets are a number or an array of numbers. Error
    texts contain no values and no message of the user's code: a node sends them to the server. An empty data set
    is an error, unless a `blank` row shows the shape of rows.

    >>> x, y = rows_of([{"img": torch.ones(2), "label": 3}, {"img": torch.zeros(2), "label": 1}])
    >>> x.shape, y
    (torch.Size([2, 2]), tensor([3, 1]))
    """
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(part, Tensor) for part in given):
        return given[0], given[1]
    items = _pairs(given)
    if not items:
        if blank is None:
            raise DataError("The data set is empty.")
        return blank[:0], torch.empty(0, dtype=torch.int64)
    rows = [_tensor(row) for row, _ in items]
    labels = [_whole(label) for _, label in items] if targets == "classes" else []
    if None in labels:
        raise DataError(
            "A label in the data set is no whole number. If it is a value, set contact.targets at the server."
        )
    if len({(row.shape, row.dtype) for row in rows}) > 1:
        raise DataError("Rows of the data set differ in shape or type: give them one of each.")
    x = torch.stack(rows)
    if targets != "classes":
        return x, _stacked([target for _, target in items]).to(x.device)
    return x, torch.tensor(labels, dtype=torch.int64, device=x.device)


def _pairs(given: Any) -> Sequence[Any]:
    """(row, label) of all items of a data set, which need not be a torch Dataset: Hugging Face's are not."""
    if isinstance(given, DataLoader):
        samplers = given.sampler, getattr(given.batch_sampler, "sampler", None)
        if any(isinstance(sampler, SubsetRandomSampler | DistributedSampler) for sampler in samplers):
            raise DataError("The loader reads a part of its data set only: give it a torch.utils.data.Subset instead.")
        given = given.dataset
    numbered = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not numbered or isinstance(given, IterableDataset | Mapping | tuple):
        raise DataError(
            "data(context) must give a pair of tensors, or a Dataset or DataLoader whose items have numbers; found "
            f"{type(given).__name__}."
        )
    try:
        items = [given[number] for number in range(len(given))]
    except Exception as error:
        raise DataError(f"The data set's own code failed: {type(error).__name__}.") from error
    if any(not isinstance(item, tuple | list | Mapping) or len(item) != 2 for item in items):
        raise DataError("Items of the data set must be (row, label), or mappings with two entries: one is not.")
    entries = {frozenset(item) if isinstance(item, Mapping) else None for item in items}
    if len(entries) > 1:
        raise DataError("Items of the data set have different entries.")
    if not isinstance(items[0] if items else (), Mapping):
        return items
    whole = [key for key in items[0] if all(_whole(item[key]) is not None for item in items)]
    if len(whole) != 1:
        raise DataError(
            "Exactly one of two entries must be a whole number in every item, the label; found "
            f"{'both' if whole else 'neither'}. Give tuples (row, label)."
        )
    (row,) = set(items[0]) - set(whole)
    return [(item[row], item[whole[0]]) for item in items]


def _whole(value: Any) -> int | None:
    """A value as a whole number, also if it is alone in an array; None if it is no whole number."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.item() if math.prod(value.shape) == 1 else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and _LABELS.min <= value <= _LABELS.max else None


def _stacked(targets: list[Any]) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(target) for target in targets]).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError("Targets in the data set must be numbers, as many for each row.") from error


def _tensor(row: Any) -> Tensor:
    """A row as a tensor. Images are refused: their axes could have any order."""
    if not isinstance(row, Tensor | np.ndarray):
        raise DataError(f"Rows of the data set must be tensors or arrays; found {type(row).__name__}.")
    try:
        return torch.as_tensor(row).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError("Rows of the data set must be of numbers.") from error
