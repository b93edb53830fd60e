"""Phase 2: the server's store of the centroids of each (client, class) cell."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedup.errors import DataError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget, union
from fedup.statistics.cell_table import Cell as Cell
from fedup.statistics.cell_table import CellName as CellName
from fedup.statistics.cell_table import CellTable
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.client_parts import ClientParts
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.kept_eraser import EraserParts
from fedup.statistics.traffic import Traffic
from fedup.targets import Targets


@dataclass(eq=False)
class Centroids:
    """All centroids at the server; under DP, noisy statistics in their place.

    A row with count 0 is empty: purged, or its cell has fewer centroids now.

    Only `put` changes the content of a slot. The old content is not kept (the difference would reveal what was
    forgotten), unless it goes into `sealed`.
    """

    vectors: Tensor  # (M, D); under DP (M, numbers of a class's statistics)
    counts: Tensor  # (M,) points behind each centroid; under DP 1 for a message
    cells: Sequence[Cell]  # sorted by (client, class)
    clients: tuple[int, ...]
    num_classes: int
    how: CentroidConfig | DP | MomentConfig
    cut: str
    base: str  # fingerprint of the model that made the features
    nonnegative: bool
    shape: tuple[int, ...]  # of one row's features at the cut, D in all
    collected_for: frozenset[Forget] = frozenset()  # requests already left out when the clients were asked
    open: set[Forget] = field(default_factory=set)  # withdrawn samples without a filter: left out all the same
    finished: Forget = field(default_factory=Forget)  # clients and classes that the model was trained without
    excluded: dict[CellName, frozenset[int]] = field(default_factory=dict)  # sample ids left out of a cell
    sample_labels: dict[int, dict[int, int]] = field(default_factory=dict)  # by client: known classes of samples
    purged: set[CellName] = field(default_factory=set)
    pending: dict[int, frozenset[int]] = field(default_factory=dict)  # by client that has not answered: its classes
    # that no filter is fitted to until then, since forgotten rows are or may be in these cells
    unnamed: dict[int, frozenset[str]] = field(default_factory=dict)  # by client: tags of persons whose rows there it
    # has not named yet
    renewed: int = 0  # how many times a client was collected from anew
    eraser_parts: EraserParts = field(default_factory=dict)  # what clients sent of rows that are erased
    sealed: dict[CellName, tuple[Tensor, Tensor]] = field(default_factory=dict)  # originals kept for restoration
    bytes_up: dict[int, int] = field(default_factory=dict)  # by client: all that it sent, as serialised
    paper_epsilons: dict[CellName, float] = field(default_factory=dict)  # if counted; not a DP guarantee
    ledger: Ledger = field(default_factory=Ledger)  # what the clients have spent under DP
    traffic: Traffic = field(default_factory=Traffic)  # of the collection; not saved to files

    content: ClassVar[str] = "centroids"  # what a row is, for people
    whole_cells_leave: ClassVar[bool] = False  # whether some samples may take all rows of their cell with them

    def __post_init__(self) -> None:
        self.cells = self._table = CellTable.of(self.cells)

    def left_out(self, requests: Iterable[Forget]) -> Forget:
        """What is never used while these requests are in force: open and finished ones are left out, too."""
        return union([*requests, *self.open, self.finished])

    @cached_property
    def known_clients(self) -> frozenset[int]:
        """All clients, quick to look up."""
        return frozenset(self.clients)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.vectors.device

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.vectors.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of all cells, empty ones included."""
        return len(self.counts)

    @property
    def facts(self) -> dict[str, Any]:
        """What is on record of a collection beyond the usual."""
        return {}

    @property
    def dp(self) -> DP | None:
        """The guarantee of the clients' releases; None for centroids."""
        return self.how if isinstance(self.how, DP) else None

    @property
    def targets(self) -> Targets:
        """What the model learns. Centroids are of classes."""
        return self.how.targets if isinstance(self.how, MomentConfig) else "classes"

    @property
    def size_bytes(self) -> int:
        """Bytes of the clients' messages together, as serialised."""
        return sum(self.bytes_up.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes that the server keeps of them."""
        return self.size_bytes

    def to(self, device: torch.device | str) -> Self:
        """An independent copy with its arrays on a device.

        Changes to one never show in the other. Each ledger knows its own charges alone, so work with one of the two.
        Only a ledger that is kept elsewhere (a run folder's) is shared by both.
        """
        return replace(self, **{part.name: _copied(getattr(self, part.name), device) for part in fields(self)})

    def cell(self, name: CellName) -> Cell | None:
        """The slot of a cell, or None if that client has no row of that class."""
        return self._table.find(name)

    def cells_of(self, client: int) -> Sequence[Cell]:
        """The slots of a client."""
        return self._table[self._table.slot(client)]

    def cells_named(self, forget_set: Forget) -> list[Cell]:
        """The slots of the clients and classes that a request names."""
        named = {cell for client in forget_set.client_ids for cell in self.cells_of(client)}
        named |= {cell for label in forget_set.class_ids for cell in self._cells_of_class(label)}
        return sorted(named, key=lambda cell: cell.name)

    def _cells_of_class(self, label: int) -> list[Cell]:
        return self._table.of_class(label)

    def classes_held(self, without: Collection[int] = ()) -> set[int]:
        """The classes that clients hold, other than these clients."""
        holders = self._table.holders
        leaving = Counter(cell.label for client in without for cell in self.cells_of(client))
        return {label for label, clients in holders.items() if clients > leaving[label]}

    def awaits(self, cell: Cell) -> bool:
        """Whether a cell is out of use until its client answers."""
        return cell.label in self.pending.get(cell.client, ())

    @property
    def cells_pending(self) -> list[Cell]:
        """The cells that are out of use until their clients answer."""
        return [cell for client in sorted(self.pending) for cell in self.cells_of(client) if self.awaits(cell)]

    def rows_in(self, cell: Cell) -> int:
        """Points behind a cell's centroids."""
        return int(self.counts[cell.slot].sum())

    def filled_in(self, cell: Cell) -> int:
        """Rows of a cell's slot that are not empty."""
        return int((self.counts[cell.slot] > 0).sum())

    def rows_without(self, cell: Cell, samples: frozenset[int]) -> int:
        """Points behind a cell's centroids if exactly these samples are left out of it."""
        return self.rows_in(cell) + len(self.excluded.get(cell.name, ())) - len(samples)

    def rows_by_class(self) -> list[int]:
        """Points behind the centroids of each class."""
        rows = torch.bincount(self.row_labels(), weights=self.counts.double(), minlength=self.num_classes)
        return [int(number) for number in rows.tolist()]

    def rows_besides(self, forget_set: Forget) -> int:
        """The number of filled rows of cells that the request does not name."""
        return int((self.counts > 0).sum()) - len(self.rows_of(self.cells_named(forget_set)))

    def may_hold(self, request: Forget) -> bool:
        """Whether a client may have rows that the request names."""
        held = any(self.cells_of(client) for client in request.client_ids)
        return bool(request.sample_ids or held or self.classes_held() & request.class_ids)

    def is_empty(self, cell: Cell) -> bool:
        """Whether nothing is left in a cell's slot."""
        return not bool(self.counts[cell.slot].any() or self.vectors[cell.slot].any())

    def row_labels(self) -> Tensor:
        """The class of each row's cell. (M,)"""
        return self._table.row_labels.to(self.vectors.device)

    def rows_of(self, cells: Iterable[Cell]) -> Tensor:
        """The filled rows of these cells."""
        chosen = list(cells)
        starts, sizes = (torch.tensor([getattr(cell, name) for cell in chosen]).long() for name in ("start", "size"))
        places = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        rows = (starts.repeat_interleave(sizes) + places).unique().to(self.counts.device)
        return rows[self.counts[rows] > 0].to(self.vectors.device)

    def take(self, cell: Cell) -> tuple[Tensor, Tensor]:
        """Copies of a slot's vectors and counts."""
        return self.vectors[cell.slot].clone(), self.counts[cell.slot].clone()

    def put(self, cell: Cell, vectors: Tensor, counts: Tensor) -> None:
        """Replace a slot's content; the rest of the slot becomes empty."""
        if len(vectors) > cell.size or len(counts) != len(vectors) or vectors.shape[1:] != self.vectors.shape[1:]:
            raise DataError(
                f"Cell {cell.name} sent {tuple(vectors.shape)} vectors and {len(counts)} counts; its slot holds "
                f"{cell.size} × {self.vectors.shape[1]}."
            )
        slot = self.vectors[cell.slot]
        slot.zero_()
        slot[: len(vectors)] = vectors.to(slot)
        self.counts[cell.slot] = 0
        self.counts[cell.start : cell.start + len(counts)] = counts.to(self.counts)

    def purge(self, forget_set: Forget, cells: Collection[Cell]) -> None:
        """Destroy these cells, which are all that clients and classes of the forget set have; and sealed originals."""
        for cell in (*cells, *self.cells_pending):  # forgotten rows are in these, too
            self.put(cell, self.vectors[:0], self.counts[:0])
            self.purged.add(cell.name)
        self.sealed.clear()
        self.eraser_parts.clear()


def _copied(value: Any, device: torch.device | str) -> Any:
    """A deep copy of whatever can change, tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Ledger | ClientParts):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_copied(item, device) for item in value)
    return value  # a number, a text or frozen


def insert(store: Centroids, summary: Summary) -> None:
    """Put a client's message into its slots."""
    vectors, counts = (rows.split(list(summary.sizes)) for rows in (summary.vectors, summary.counts))
    for label, excluded, *content in zip(summary.labels, summary.excluded, vectors, counts, strict=True):
        cell = store.cell((summary.client, label))
        if cell is None:
            raise DataError(f"Client {summary.client} answered for class {label}, which it had not at collection.")
        store.put(cell, *content)
        store.excluded.pop(cell.name, None)
        if excluded:
            store.excluded[cell.name] = excluded
        store.purged.discard(cell.name)
    store.paper_epsilons |= {
        (summary.client, label): epsilon for label, epsilon in zip(summary.labels, summary.paper_epsilons, strict=False)
    }
