"""Features of rows for a release under differential privacy: reading them never fails, and no row touches another's.

Whoever sends the weights can make features overflow, or the model fail, for exactly those rows that it is curious
about. So nothing is raised because of what a row holds: what is NaN or infinite counts as 0, and so does a row that the
model fails on. Batches always have the same size, with blanks where there are no rows, and a row's place in them
depends on its place among all rows alone: the last bits of a feature differ between batch sizes, and weights can be
chosen that make last bits large.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedup.privacy.dp import finite

PRIVATE_BATCH = 64  # rows at a time, always

FeaturesOf = Callable[[Tensor], Tensor]  # of a batch (B, …): (B, D)


def blank_row(x: Tensor) -> Tensor:
    """A row of zeros like those of `x`, which may have none. (1, …)"""
    return x.new_zeros(1, *x.shape[1:])


def read_privately(
    features_of: FeaturesOf, x: Tensor, rows: Tensor, *, wanted: Tensor, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The wanted ones of the rows (a mask over them) and their features in double precision, batch by batch.

    Rows that are not wanted are never read: a blank stands in for each.
    """
    blank = blank_row(x)
    for part, mask in zip(rows.split(PRIVATE_BATCH), wanted.split(PRIVATE_BATCH), strict=True):
        batch = _blanks(blank)
        batch[: len(part)][mask] = x[part[mask]]
        yield part[mask], finite(_read(features_of, batch, blank, width)[: len(part)][mask.cpu()])


def _read(features_of: FeaturesOf, batch: Tensor, blank: Tensor, width: int) -> Tensor:
    """Features of a batch; where the model fails on it, of each row at its place among blanks, or 0 where it fails."""
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
    """None where the model does not take the batch, or makes something of it that has another shape than of blanks."""
    try:
        features = features_of(batch.clone())  # a model may write to its input
        return features.detach().double().cpu() if features.shape == (len(batch), width) else None
    except (MemoryError, torch.OutOfMemoryError):  # all batches are of one size: that is the machine, not a row
        raise
    except Exception:  # whatever the user's own model raises
        return None


def _blanks(blank: Tensor) -> Tensor:
    return blank.repeat(PRIVATE_BATCH, *[1] * (blank.ndim - 1))
