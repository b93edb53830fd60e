"""Features of rows for a release under differential privacy: reading never fails, and no row affects another.

The sender of the weights can make features overflow, or the model fail, for the very rows it is curious about. So no
content of a row raises an error: NaN and infinite values count as 0, and so does a row on which the model fails.
Batches always have the same size, filled up with blanks, and a row's place in them depends on its place among all rows
alone: the last bits of a feature differ between batch sizes, and weights can make last bits large.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedup.privacy.dp import finite

PRIVATE_BATCH = 64  # rows at a time, always

FeaturesOf = Callable[[Tensor], Tensor]  # of a batch (B, …): (B, D)


def blank_row(x: Tensor) -> Tensor:
    """A row of zeros like those of `x`, which may be empty. (1, …)"""
    return x.new_zeros(1, *x.shape[1:])


def read_privately(
    features_of: FeaturesOf, x: Tensor, rows: Tensor, *, wanted: Tensor, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that the mask `wanted` selects and their features in double precision, batch by batch.

    Other rows are never read: a blank stands in for each.
    """
    blank = blank_row(x)
    for part, mask in zip(rows.split(PRIVATE_BATCH), wanted.split(PRIVATE_BATCH), strict=True):
        batch = _blanks(blank)
        batch[: len(part)][mask] = x[part[mask]]
        yield part[mask], finite(_read(features_of, batch, blank, width)[: len(part)][mask.cpu()])


def _read(features_of: FeaturesOf, batch: Tensor, blank: Tensor, width: int) -> Tensor:
    """Features of a batch; if the model fails on it, of each row alone among blanks, or 0 if it fails there, too."""
    together = _features(features_of, batch, width)
    if together is not None:
        return together
    features = torch.zeros(len(batch), width, dtype=torch.float64)
    for place in range(len(batch)):
        alone = _blanks(blank)
        alone[place] = batch[place]
        own = _features(features_of, alone, width)
        if own is not None:
            features[place] = own[place]
    return features


def _features(features_of: FeaturesOf, batch: Tensor, width: int) -> Tensor | None:
    """None if the model fails on the batch, or returns another shape than for blanks."""
    try:
        features = features_of(batch.clone())  # a model may write to its input
        return features.detach().double().cpu() if features.shape == (len(batch), width) else None
    except (MemoryError, torch.OutOfMemoryError):  # the machine's fault, not a row's: all batches have one size
        raise
    except Exception:  # the model may raise anything
        return None


def _blanks(blank: Tensor) -> Tensor:
    return blank.repeat(PRIVATE_BATCH, *[1] * (blank.ndim - 1))
