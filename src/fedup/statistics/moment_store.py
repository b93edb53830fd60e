"""Phase 2, moments: the server's store of sums that add up. Forgetting is subtraction."""

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedup.errors import ContactError, DataError
from fedup.request import Forget
from fedup.statistics.cell_table import CellTable
from fedup.statistics.client_parts import ClientPart, ClientParts
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig, one_class, rows_staying
from fedup.statistics.retained_moments import ways
from fedup.statistics.store import Cell, CellName, Centroids


@dataclass(eq=False)
class MomentStore(Centroids):
    """Integer sums in place of centroids: a cell is one row, the sum of its features; its count is its rows.

    Second moments are kept of all rows together, by client and by class. So a client or a class is forgotten by
    subtraction, and nobody is asked. Where both are forgotten their common cell is subtracted twice: its second moments
    are asked for and added back. What is kept of clients and classes lies on the CPU, wherever the model computes.

    Totals are in memory; the sums of each client are in `parts`, of which a request reads those it forgets. `vectors`
    has no rows, and `cells` is a `CellTable`.
    """

    total: IntegerMoments = field(default_factory=lambda: IntegerMoments.zeros(0, 0))  # of all cells not purged
    parts: ClientParts = field(default_factory=lambda: ClientParts(0))
    of_classes: dict[int, Tensor] = field(default_factory=dict)  # second moments, without clients that sent none of
    unsent: set[int] = field(default_factory=set)  # single classes: these
    of_cells: dict[CellName, Tensor] = field(default_factory=dict)  # second moments that were asked for
    sealed_second: dict[CellName, Tensor] = field(default_factory=dict)  # what a sealed original has beyond its cell
    sizes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # (M,) rows at collection
    few: dict[int, set[int]] = field(default_factory=dict)  # by class, clients that have too few rows of it to report
    shortened: int = 0  # rows beyond the bound
    clipped: int = 0  # rows with a value beyond its bound
    unreported: dict[int, int] = field(default_factory=dict)  # by client: rows of cells that have too few of them

    content: ClassVar[str] = "sums of cells"
    whole_cells_leave: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.cells, CellTable):
            raise TypeError("the cells of moments are a CellTable")
        self._table = self.cells

    @property
    def config(self) -> MomentConfig:
        """How features became integers."""
        assert isinstance(self.how, MomentConfig)
        return self.how

    def to(self, device: torch.device | str) -> Self:
        """An independent copy; it stays on the CPU."""
        return super().to("cpu")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is kept."""
        seconds = (self.of_classes, self.of_cells, self.sealed_second)
        small = sum(second.nbytes for part in seconds for second in part.values())
        return self.counts.nbytes + self.sizes.nbytes + self.total.nbytes + self.parts.nbytes + small

    @property
    def facts(self) -> dict[str, Any]:
        clipped = {"clipped": self.clipped} if self.config.targets == "values" else {}
        return {"shortened": self.shortened, "unreported": sum(self.unreported.values()), **clipped}

    # --- cells

    def cell(self, name: CellName) -> Cell | None:
        return self._table.find(name)

    def cells_of(self, client: int) -> Sequence[Cell]:
        return self._table[self._table.slot(client)]

    @property
    def cell_columns(self) -> tuple["array[int]", "array[int]"]:
        """The client and the class of each cell."""
        return self._table.columns

    def _cells_of_class(self, label: int) -> list[Cell]:
        return self._table.of_class(label)

    @property
    def _holders(self) -> Counter[int]:
        return self._table.holders

    def rows_by_class(self) -> list[int]:
        return [int(number) for number in self.total.counts.tolist()]

    def rows_without(self, cell: Cell, samples: frozenset[int]) -> int:
        rows, up_to_date = int(self.sizes[cell.start]), samples == self.excluded.get(cell.name, frozenset())
        return super().rows_without(cell, samples) if up_to_date or not rows else self.rows_staying(cell, samples)

    def rows_staying(self, cell: Cell, samples: frozenset[int]) -> int:
        """Rows that the client's moments of a cell are of without these samples, if its own rules are no stricter."""
        return rows_staying(int(self.sizes[cell.start]), len(samples), self.config)

    def target_sums(self, moments: IntegerMoments) -> list[int]:
        """How many rows of these moments have each label; of values, how many there are."""
        if self.config.targets == "values":
            return [moments.rows] * self.num_classes
        return [int(number) for number in moments.sums[-1, -self.config.outputs :].tolist()]

    def rows_besides(self, forget_set: Forget) -> int:
        return int((self.counts > 0).sum()) - sum(self.rows_in(cell) > 0 for cell in self.cells_named(forget_set))

    def may_hold(self, request: Forget) -> bool:
        few = [label in request.class_ids or bool(request.client_ids & own) for label, own in self.few.items()]
        if self.config.targets == "labels":  # a cell holds all rows of a client
            sums = self.target_sums(self.total)
            few += [sums[label] > 0 for label in request.class_ids if label < len(sums)]
        return super().may_hold(request) or any(few)

    def take(self, cell: Cell) -> tuple[Tensor, Tensor]:
        return self.sums_of(cell)[None], self.counts[cell.slot].clone()

    def is_empty(self, cell: Cell) -> bool:
        return not bool(self.counts[cell.start]) and not bool(self.sums_of(cell).any())

    def sums_of(self, cell: Cell) -> Tensor:
        """The sum of the features of a cell. (D,)"""
        return self._part(cell.client).sums[cell.start - self._table.slot(cell.client).start]

    def _part(self, client: int) -> ClientPart:
        """What is kept of a client: after a purge nothing."""
        if client in self.parts:
            return self.parts[client]
        return ClientPart(torch.zeros(len(self._table.labels(client)), self.total.width, dtype=torch.int64), None)

    def moments_of(self, client: int) -> IntegerMoments:
        """The counts and sums of a client, and its second moments where they are known."""
        own, part, rows = IntegerMoments.zeros(*self.total.sums.shape), self._part(client), self._table
        labels = rows.labels(client)
        own.counts[labels], own.sums[labels] = self.counts[rows.slot(client)], part.sums
        return own if part.second is None else replace(own, second=part.second)

    # --- what is left

    @property
    def clients_out(self) -> frozenset[int]:
        """Clients that are out of use until they answer: nothing of them is in what is retained."""
        return frozenset(client for client, labels in self.pending.items() if labels)

    def missing_cells(self, forget_set: Forget, absent: Collection[int] = ()) -> list[Cell]:
        """Cells whose second moments must be asked for, to leave out these clients and classes; none of a client that
        is absent."""
        first: list[Cell] | None = None
        for way in ways(self, self._without_those_out(forget_set)):
            missing = way.missing(self)
            if not missing:
                return []
            if first is None and not any(cell.client in absent for cell in missing):
                first = missing
        return first or []

    def retained(self, forget_set: Forget) -> IntegerMoments:
        """The moments of everything but these clients and classes: the total less what is forgotten. Clients that are
        out of use are left out, too."""
        return self._remaining(self._without_those_out(forget_set))

    def all_but(self, client: int) -> IntegerMoments:
        """The moments of all others, also of those that are out of use."""
        return self._remaining(Forget(frozenset([client])))

    def _remaining(self, forget_set: Forget) -> IntegerMoments:
        counts, sums = self.total.counts.clone(), self.total.sums.clone()
        parts = {client: self.parts[client] for client in sorted(forget_set.client_ids) if client in self.parts}
        for client, part in parts.items():
            labels = self._table.labels(client)
            counts[labels] -= self.counts[self._table.slot(client)]
            sums[labels] -= part.sums
        out_classes = sorted(label for label in forget_set.class_ids if label < self.num_classes)
        counts[out_classes], sums[out_classes] = 0, 0
        way = next((way for way in ways(self, forget_set) if not way.missing(self)), None)
        if way is None:
            names = ", ".join(str(cell.name) for cell in next(ways(self, forget_set)).missing(self))
            raise ContactError(f"The second moments of cells {names} are not here yet: their clients must be asked.")
        retained = IntegerMoments(counts, sums, way.second(self, parts))
        self._check(retained, "What is retained", products=bool(way.cells or way.classes))
        return retained

    def _without_those_out(self, forget_set: Forget) -> Forget:
        return replace(forget_set, client_ids=forget_set.client_ids | self.clients_out)

    def classes_with_few(self, forget_set: Forget) -> list[int]:
        """Classes to keep of which a retained client has too few rows to report."""
        kept = sorted(self.few.keys() - forget_set.class_ids)
        return [label for label in kept if self.few[label] - forget_set.client_ids]

    def classes_waiting(self, forget_set: Forget) -> set[int]:
        """Classes to keep of which a retained client has rows and is out of use until it answers."""
        cells = (cell for client in self.clients_out - forget_set.client_ids for cell in self.cells_of(client))
        return {cell.label for cell in cells if int(self.counts[cell.start])} - forget_set.class_ids

    def _check(self, moments: IntegerMoments, what: str, *, products: bool = True) -> None:
        try:
            moments.check(self.config, products=products)
        except DataError as error:
            raise DataError(
                f"{what} is not what any rows have: {error}. A client sent wrong statistics, or the store is damaged."
            ) from error

    def check_cell(self, cell: Cell, second: Tensor) -> None:
        """Raise unless the second moments of a cell fit those of its client and of its class."""
        alone = one_class(self.moments_of(cell.client), cell.label, second)
        self._check_around(cell, IntegerMoments.zeros(*alone.sums.shape) - alone, f"Cell {cell.name}, taken from")

    def _check_around(self, cell: Cell, change: IntegerMoments, what: str) -> None:
        """Raise unless rows can have what the cell's client, and its class, have after a change."""
        label = cell.label
        if self.parts.has_second(cell.client):
            self._check(self.moments_of(cell.client) + change, f"{what} its client,")
        if label in self.of_classes and cell.client not in self.unsent:
            sent = one_class(self.total, label, self.of_classes[label])
            for client in self.unsent:
                unsent = self.cell((client, label))
                if unsent is not None and int(self.counts[unsent.start]):
                    sent.counts[label] -= self.counts[unsent.start]
                    sent.sums[label] -= self.sums_of(unsent)
            self._check(sent + change, f"{what} its class,")

    def change(self, cell: Cell, by: IntegerMoments, second: Tensor) -> None:
        """Add to a cell (negative numbers: take away), and to all totals that it is part of."""
        name, label, part = cell.name, cell.label, self._part(cell.client)
        row, count = cell.start - self._table.slot(cell.client).start, self.counts[cell.start] + by.counts[label]
        if int(count) < 0:
            raise DataError(f"Client {cell.client} takes away more rows of class {label} than it has.")
        sums = part.sums.clone()
        sums[row] += by.sums[label]
        if float(sums[row].double().norm()) > int(count) * self.config.limit * (1 + 1e-9) or (
            self.nonnegative and bool((sums[row, : self.total.width - self.config.outputs] < 0).any())
        ):
            raise DataError(f"Client {cell.client} reports changes of class {label} that leave sums no rows have.")
        change = one_class(by, label, second)
        self._check_around(cell, change, f"The change of cell {name}, put to")
        total = self.total + change
        self._check(total, f"The total with the change of cell {name}")
        self.parts[cell.client] = ClientPart(sums, None if part.second is None else part.second + second)
        self.total, self.counts[cell.start] = total, count
        if label in self.of_classes and cell.client not in self.unsent:
            self.of_classes[label] = self.of_classes[label] + second
        if name in self.of_cells:
            self.of_cells[name] = self.of_cells[name] + second

    def purge(self, forget_set: Forget, cells: Collection[Cell]) -> None:
        """Destroy what is kept of these clients and classes.

        Second moments that cannot be told from what is destroyed are destroyed with it: clients are asked for theirs
        when they are needed next.
        """
        forget_set = self._without_those_out(forget_set)  # forgotten rows are in these sums
        cells = self.cells_named(forget_set)
        left, filled = self.retained(forget_set), dict[int, list[Cell]]()
        for cell in cells:
            if int(self.counts[cell.start]):
                filled.setdefault(cell.client, []).append(cell)
        self.parts.replace_all(
            (client, None if client in forget_set.client_ids else self._part_without(client, own))
            for client, own in filled.items()
            if client in self.parts
        )  # where this fails nothing has changed; what follows is in memory
        self.total = left
        for cell in (cell for own in filled.values() for cell in own):
            self._purge_from_class(cell, forget_set)
            self.counts[cell.start] = 0
        self.purged |= {cell.name for cell in cells}
        self.sealed.clear()
        self.sealed_second.clear()
        self.eraser_parts.clear()

    def _part_without(self, client: int, cells: Collection[Cell]) -> ClientPart:
        """What is kept of a client if these cells go."""
        part, first = self.parts[client], self._table.slot(client).start
        second = part.second
        for cell in cells:
            part.sums[cell.start - first] = 0
            known = self.of_cells.get(cell.name)
            second = None if second is None or known is None else second - known
        return ClientPart(part.sums, second)

    def _purge_from_class(self, cell: Cell, forget_set: Forget) -> None:
        label, known = cell.label, self.of_cells.pop(cell.name, None)
        gone = label in forget_set.class_ids
        if label in self.of_classes and (gone or cell.client not in self.unsent):
            if gone or known is None:
                del self.of_classes[label]
            else:
                self.of_classes[label] = self.of_classes[label] - known
