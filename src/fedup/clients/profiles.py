"""What answers claim of nodes' rows, by node: in columns, so that very many nodes can be compared with each other."""

import mmap
from array import array
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fedup.files import explained

_IN_MEMORY_BYTES = 2**23  # of means; more of them lie in an unnamed file


@dataclass(frozen=True, eq=False)
class Profile:
    """What an answer claims of a node's rows."""

    labels: tuple[int, ...]  # of the classes it reports
    rows: Tensor  # (C,) of each; under DP noisy
    means: Tensor  # (C, D) of their features
    length: float  # of its longest row, or the root mean square of all; 0 where nothing is known
    deviation: Tensor  # (C,) of noise on each number of a mean

    @property
    def total(self) -> float:
        """Rows of all classes."""
        return float(self.rows.clamp(min=0).sum())


@dataclass(frozen=True, eq=False)
class Columns:
    """The cells of some nodes: one entry for each class that a node reports. Nodes are named by their place."""

    nodes: list[int]
    lengths: Tensor  # (N,)
    node: Tensor  # (M,) place of the cell's node; 32 bits, as labels and cells: there may be millions
    labels: Tensor  # (M,)
    rows: Tensor  # (M,)
    deviation: Tensor  # (M,) in single precision
    _cells: Tensor  # (M,) rows of the table of means
    _table: np.ndarray  # a view of a file, if there are many

    @property
    def width(self) -> int:
        """Numbers of a mean."""
        return int(self._table.shape[1])

    def means(self, chosen: Tensor, columns: slice = slice(None)) -> Tensor:
        """Means of chosen cells, or some columns of them; in single precision. (n, D)"""
        return torch.from_numpy(self._table[self._cells[chosen].numpy(), columns])

    @property
    def totals(self) -> Tensor:
        """Rows of each node. (N,)"""
        return self.per_node(self.rows.clamp(min=0))

    def per_node(self, values: Tensor) -> Tensor:
        """The sum of a value over the cells of each node. (N,)"""
        return torch.zeros(len(self.nodes), dtype=torch.float64).index_add_(0, self.node, values)


class _Means:
    """Rows of single-precision numbers, appended one after another; shared by profiles that have nodes in common."""

    def __init__(self) -> None:
        self._file: IO[bytes] = BytesIO()
        self._bytes, self._width = 0, 0
        self._view: np.ndarray | None = None

    def add(self, means: Tensor) -> None:
        """Append rows (C, D)."""
        if not len(means):
            return
        content, self._width, self._view = means.float().contiguous().numpy().data, means.shape[1], None
        with explained("write what nodes are compared by to a temporary file"):
            if isinstance(self._file, BytesIO) and self._bytes + content.nbytes > _IN_MEMORY_BYTES:
                on_disk = TemporaryFile()  # noqa: SIM115 (closed with its last user)
                on_disk.write(self._file.getbuffer())
                self._file = on_disk
            self._file.write(content)
        self._bytes += content.nbytes

    def view(self) -> np.ndarray:
        """All rows, not to be changed. (M, D)"""
        if self._view is None and self._bytes:
            if isinstance(self._file, BytesIO):
                numbers = np.frombuffer(self._file.getvalue(), dtype=np.float32)
            else:
                self._file.flush()
                content = mmap.mmap(self._file.fileno(), self._bytes, access=mmap.ACCESS_READ)
                numbers = np.frombuffer(content, dtype=np.float32)
            self._view = numbers.reshape(-1, self._width)
        return np.zeros((0, 1), dtype=np.float32) if self._view is None else self._view


class Profiles(MutableMapping[int, Profile]):
    """Profiles by node. What is replaced stays in the columns, and no index leads to it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of each node, among all that were added
        self._starts = array("q", [0])  # of the cells of each
        self._lengths = array("d")
        self._labels, self._rows, self._deviation = array("i"), array("d"), array("f")
        self._means = _Means()

    @classmethod
    def of(cls, profiles: Mapping[int, Profile]) -> "Profiles":
        """The same profiles in columns."""
        if isinstance(profiles, Profiles):
            return profiles
        table = cls()
        table.update(profiles)
        return table

    def only(self, nodes: Collection[int]) -> "Profiles":
        """Those of some nodes, in the order of these; they share the columns, and can grow on their own."""
        some = Profiles.__new__(Profiles)
        some.__dict__ |= self.__dict__
        some._places = {node: self._places[node] for node in nodes if node in self._places}
        return some

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __getitem__(self, node: int) -> Profile:
        place = self._places[node]
        cells = slice(self._starts[place], self._starts[place + 1])
        means = torch.from_numpy(self._means.view()[cells].copy())
        rows, deviation = (torch.tensor(column[cells], dtype=torch.float64) for column in (self._rows, self._deviation))
        return Profile(tuple(self._labels[cells]), rows, means, self._lengths[place], deviation)

    def __setitem__(self, node: int, profile: Profile) -> None:
        self._means.add(profile.means)
        self._labels.extend(profile.labels)
        self._rows.extend(profile.rows.tolist())
        self._deviation.extend(profile.deviation.tolist())
        self._places[node] = len(self._lengths)
        self._lengths.append(profile.length)
        self._starts.append(len(self._labels))

    def __delitem__(self, node: int) -> None:
        del self._places[node]

    def lengths(self) -> dict[int, float]:
        """By node, the length of its rows."""
        return {node: self._lengths[place] for node, place in self._places.items()}

    def columns(self) -> Columns:
        """All cells of these nodes, node by node."""
        nodes, places = list(self._places), np.fromiter(self._places.values(), dtype=np.int64)
        starts = _tensor_of(self._starts).numpy()
        first, counts = starts[places], np.diff(starts)[places]
        node = np.arange(len(nodes), dtype=np.int32).repeat(counts)
        cells = (first - (counts.cumsum() - counts)).astype(np.int32).repeat(counts)
        cells += np.arange(len(node), dtype=np.int32)
        own, chosen = (self._labels, self._rows, self._deviation), torch.from_numpy(cells)
        labels, rows, deviation = (_tensor_of(column).index_select(0, chosen) for column in own)
        lengths = _tensor_of(self._lengths)[places]
        return Columns(nodes, lengths, torch.from_numpy(node), labels, rows, deviation, chosen, self._means.view())


def _tensor_of(column: "array[int] | array[float]") -> Tensor:
    """A column as a tensor, which has to go before the column can grow."""
    stored = {"d": torch.float64, "f": torch.float32, "i": torch.int32, "q": torch.int64}[column.typecode]
    return torch.frombuffer(column, dtype=stored) if column else torch.zeros(0, dtype=stored)
