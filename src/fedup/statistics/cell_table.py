"""The cells of very many clients: two columns of numbers, from which a `Cell` is made when it is looked at."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch

from fedup.errors import DataError
from fedup.statistics.store import Cell, CellName


class CellTable(Sequence[Cell]):
    """Cells of one row each, sorted by client and class. Numbers of clients may take 64 bits, as Flower's nodes do.

    >>> cells = CellTable([3, 3, 8], [0, 4, 4])
    >>> cells.find((8, 4))
    Cell(client=8, label=4, start=2, size=1)
    """

    def __init__(self, clients: Iterable[int], labels: Iterable[int]) -> None:
        self._clients, self._labels = array("Q", clients), array("q", labels)
        names = zip(self._clients, self._labels, strict=True)
        before = (-1, -1)
        for name in names:
            if not before < name or min(name) < 0:
                raise DataError("cells are not sorted by client and class")
            before = name
        self.holders = Counter(self._labels)  # of each class

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
        return Cell(self._clients[positions], self._labels[positions], positions, 1)

    def __iter__(self) -> Iterator[Cell]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellTable) and self.columns == other.columns

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> tuple["array[int]", "array[int]"]:
        """The client and the class of each cell."""
        return self._clients, self._labels

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
