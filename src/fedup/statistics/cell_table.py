"""The cells of very many clients: columns of numbers, from which a `Cell` is made when it is looked at."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedup.errors import DataError

CellName = tuple[int, int]  # (client, class)


@dataclass(frozen=True, slots=True)
class Cell:
    """A slot of a store: rows start … start + size hold what is kept of one class of one client."""

    client: int
    label: int
    start: int
    size: int

    @property
    def name(self) -> CellName:
        return self.client, self.label

    @property
    def slot(self) -> slice:
        return slice(self.start, self.start + self.size)


class CellTable(Sequence[Cell]):
    """Cells sorted by client and class, of one row each unless `sizes` are given. Each starts where the one before it
    ends. Numbers of clients may take 64 bits, as Flower's nodes do.

    >>> cells = CellTable([3, 3, 8], [0, 4, 4])
    >>> cells.find((8, 4))
    Cell(client=8, label=4, start=2, size=1)
    """

    def __init__(self, clients: Iterable[int], labels: Iterable[int], sizes: Iterable[int] | None = None) -> None:
        self._clients, self._labels = _column("Q", clients), _column("q", labels)
        if len(self._clients) != len(self._labels) or not _are_sorted(self._clients, self._labels):
            raise DataError("cells are not sorted by client and class")
        self._starts: array[int] | None = None  # and the end of the last one; None: every cell has one row
        if sizes is not None:
            self._starts = array("q", accumulate(sizes, initial=0))
            if len(self._starts) != len(self) + 1 or bool((self.sizes < 0).any()):
                raise DataError("the sizes of cells do not fit the cells")
        self.holders = Counter(self._labels)  # of each class

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "CellTable":
        """The same cells in columns."""
        if isinstance(cells, CellTable):
            return cells
        columns = zip(*((cell.client, cell.label, cell.size) for cell in cells), strict=True) if cells else ((), (), ())
        table = cls(*columns)
        if any(own.start != cell.start for own, cell in zip(table, cells, strict=True)):
            raise DataError("cells do not lie one behind the other")
        return table

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> Cell: ...
    @overload
    def __getitem__(self, index: slice) -> list[Cell]: ...
    def __getitem__(self, index: int | slice) -> Cell | list[Cell]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [self[i] for i in positions]
        start = positions if self._starts is None else self._starts[positions]
        size = 1 if self._starts is None else self._starts[positions + 1] - start
        return Cell(self._clients[positions], self._labels[positions], start, size)

    def __iter__(self) -> Iterator[Cell]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellTable) and self.columns == other.columns and torch.equal(self.sizes, other.sizes)

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> tuple["array[int]", "array[int]"]:
        """The client and the class of each cell."""
        return self._clients, self._labels

    @property
    def num_rows(self) -> int:
        """Rows of all cells."""
        return len(self) if self._starts is None else self._starts[-1]

    @property
    def sizes(self) -> Tensor:
        """The rows of each cell. (cells,)"""
        if self._starts is None:
            return torch.ones(len(self), dtype=torch.int64)
        return torch.frombuffer(self._starts, dtype=torch.int64).diff()

    @property
    def row_labels(self) -> Tensor:
        """The class of each row's cell. (rows,)"""
        labels = torch.frombuffer(self._labels, dtype=torch.int64) if len(self) else torch.zeros(0, dtype=torch.int64)
        return labels.repeat_interleave(self.sizes)

    def slot(self, client: int) -> slice:
        """The rows of a client."""
        return slice(bisect_left(self._clients, client), bisect_right(self._clients, client))

    def labels(self, client: int) -> list[int]:
        """The classes of a client's cells, in the order of its rows."""
        return list(self._labels[self.slot(client)])

    def find(self, name: CellName) -> Cell | None:
        """The cell of that client and class, if there is one."""
        rows = self.slot(name[0])
        at = bisect_left(self._labels, name[1], rows.start, rows.stop)
        return self[at] if at < rows.stop and self._labels[at] == name[1] else None

    def of_class(self, label: int) -> list[Cell]:
        """The cells of a class."""
        rows = torch.frombuffer(self._labels, dtype=torch.int64) == label if len(self) else torch.zeros(0)
        return [self[i] for i in rows.nonzero().flatten().tolist()]


def _column(typecode: str, numbers: Iterable[int]) -> "array[int]":
    """A column of numbers; one that is a column already is not copied, and must not be changed any more."""
    if isinstance(numbers, array) and numbers.typecode == typecode:
        return numbers
    return array(typecode, numbers)


def _are_sorted(clients: "array[int]", labels: "array[int]") -> bool:
    client, label = (np.frombuffer(column, dtype=column.typecode) for column in (clients, labels))
    ascend = (client[1:] > client[:-1]) | ((client[1:] == client[:-1]) & (label[1:] > label[:-1]))
    return bool(ascend.all() and (label >= 0).all())
