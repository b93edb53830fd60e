"""Mean and deviation of columns from what clients send: counts and sums, then squares of deviations.

In two rounds, since sums of squares alone lose every digit where a mean is large beside its deviation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_DIGITS = 12  # of the constants: what is left of rounding does not depend on the order of clients


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """What a client sends: by column, how many rows have a value, and the sum of the values."""

    counts: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "ColumnSums":
        """The sums of a client's rows; NaN is a missing value. (N, D)"""
        return cls((~np.isnan(rows)).sum(0), np.asarray(np.nansum(rows, 0, dtype=np.float64)))


def squared_deviations(rows: np.ndarray, means: np.ndarray) -> np.ndarray:
    """What a client sends in the second round: by column, the sum of squared deviations from the mean of all."""
    return np.asarray(np.nansum(np.square(rows - means), 0))


def mean_and_deviation(clients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column over all clients, made from the clients' messages alone.

    >>> means, deviations = mean_and_deviation([np.array([[1.0], [2.0]]), np.array([[6.0]])])
    >>> means.tolist(), [round(value, 3) for value in deviations.tolist()]
    ([3.0], [2.16])
    """
    first = [ColumnSums.of(rows) for rows in clients]
    counts = np.maximum(_total(message.counts for message in first), 1)
    means = _total(message.sums for message in first) / counts
    deviations = np.sqrt(_total(squared_deviations(rows, means) for rows in clients) / counts)
    deviations[deviations <= 1e-12 * np.abs(means)] = 1.0  # the same value everywhere
    return _rounded(means), _rounded(deviations)


def _total(messages: Iterable[np.ndarray]) -> np.ndarray:
    return np.add.reduce(list(messages))


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.array([float(f"{value:.{_DIGITS}g}") for value in values.tolist()])
