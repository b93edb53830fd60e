"""Phase 2, moments: the server's store of sums that add up. Forgetting is subtraction."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedup.errors import ContactError, DataError
from fedup.request import Forget
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig, one_class
from fedup.statistics.store import Cell, CellName, Centroids


@dataclass(eq=False)
class MomentStore(Centroids):
    """Integer sums in place of centroids: a cell is one row, the sum of its features; its count is its rows.

    Second moments are kept of all rows together, by client and by class. So a client or a class is forgotten by
    subtraction, and nobody is asked. Where both are forgotten their common cell is subtracted twice: its second moments
    are asked for and added back. What is kept of clients and classes lies on the CPU, wherever the model computes.
    """

    total: IntegerMoments = field(default_factory=lambda: IntegerMoments.zeros(0, 0))  # of all cells not purged
    of_clients: dict[int, Tensor] = field(default_factory=dict)  # second moments; missing: its cells are asked for
    of_classes: dict[int, Tensor] = field(default_factory=dict)  # likewise; without clients that sent none by class
    unsent: set[int] = field(default_factory=set)  # these clients
    of_cells: dict[CellName, Tensor] = field(default_factory=dict)  # those that were asked for
    sealed_second: dict[CellName, Tensor] = field(default_factory=dict)  # what a sealed original has beyond its cell
    sizes: dict[CellName, int] = field(default_factory=dict)  # rows of each cell at collection, where it had any
    few: set[int] = field(default_factory=set)  # classes of which a client has too few rows to report
    shortened: int = 0  # rows beyond the bound
    unreported: int = 0  # rows of cells that have too few of them

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
        seconds = (self.of_clients, self.of_classes, self.of_cells, self.sealed_second)
        return (
            self.vectors.nbytes
            + self.counts.nbytes
            + self.total.nbytes
            + sum(second.nbytes for part in seconds for second in part.values())
        )

    def missing_cells(self, forget_set: Forget) -> list[Cell]:
        """Cells whose second moments must be asked for, to leave out these clients and classes."""
        return sorted(
            {cell for _, cell in self._single_cells(forget_set) if cell.name not in self.of_cells},
            key=lambda cell: cell.name,
        )

    def retained(self, forget_set: Forget) -> IntegerMoments:
        """The moments of everything but these clients and classes: the total less what is forgotten."""
        out_clients = self._known_clients(forget_set)
        counts, sums, second = self.total.counts.clone(), self.total.sums.clone(), self.total.second.clone()
        for client in out_clients:
            for cell in self.cells_of(client):
                counts[cell.label] -= self.counts[cell.start].long()
                sums[cell.label] -= self.vectors[cell.start]
        out_classes = sorted(label for label in forget_set.class_ids if label < self.num_classes)
        counts[out_classes], sums[out_classes] = 0, 0
        for client in out_clients:
            second -= self.of_clients.get(client, 0)
        for label in out_classes:
            second -= self.of_classes.get(label, 0)
        for sign, cell in self._single_cells(forget_set):
            if cell.name not in self.of_cells:
                raise ContactError(
                    f"The second moments of cell {cell.name} are not here yet: its client must be asked."
                )
            second += sign * self.of_cells[cell.name]
        retained = IntegerMoments(counts, sums, second)
        self._check(retained, "What is retained")
        return retained

    def _check(self, moments: IntegerMoments, what: str) -> None:
        try:
            moments.check(self.config)
        except DataError as error:
            raise DataError(
                f"{what} is not what any rows have: {error}. A client sent wrong statistics, or the store is damaged."
            ) from error

    def check_cell(self, cell: Cell, second: Tensor) -> None:
        """Raise unless the second moments of a cell fit those of its client and of its class."""
        name = f"Cell {cell.name}"
        alone = IntegerMoments.zeros(self.num_classes, self.total.width)
        for own in self.cells_of(cell.client):
            if own.label != cell.label:
                alone.counts[own.label], alone.sums[own.label] = self.counts[own.start], self.vectors[own.start]
        if cell.client in self.of_clients:
            self._check(replace(alone, second=self.of_clients[cell.client] - second), f"{name}, taken from its client,")
        if cell.label in self.of_classes and cell.client not in self.unsent:
            others = IntegerMoments.zeros(self.num_classes, self.total.width)
            for client in self.clients:
                held = self.cell((client, cell.label))
                if held is not None and client != cell.client and client not in self.unsent:
                    others.counts[cell.label] += self.counts[held.start]
                    others.sums[cell.label] += self.vectors[held.start]
            self._check(replace(others, second=self.of_classes[cell.label] - second), f"{name}, taken from its class,")

    def _known_clients(self, forget_set: Forget) -> list[int]:
        return [client for client in forget_set.client_ids if self.cells_of(client)]

    def _single_cells(self, forget_set: Forget) -> Iterator[tuple[int, Cell]]:
        """Cells that count by themselves when clients and classes are left out, and with which sign: overlaps are
        subtracted twice, and cells of a client or class whose own second moments are unknown are not subtracted yet."""
        clients = forget_set.client_ids
        for label in forget_set.class_ids:
            known = label in self.of_classes
            for client in clients | self.unsent if known else self.clients:
                cell = self.cell((client, label))
                if cell is None or not int(self.counts[cell.start]):
                    continue
                with_class = known and client not in self.unsent
                with_client = client in clients and client in self.of_clients
                if with_class and with_client:
                    yield 1, cell
                elif not with_class and not with_client:
                    yield -1, cell
        for client in clients - self.of_clients.keys():
            for cell in self.cells_of(client):
                if cell.label not in forget_set.class_ids and int(self.counts[cell.start]):
                    yield -1, cell

    def change(self, cell: Cell, by: IntegerMoments, second: Tensor) -> None:
        """Add to a cell (negative numbers: take away), and to all totals that it is part of."""
        name, label = cell.name, cell.label
        count = self.counts[cell.start].long() + by.counts[label]
        if int(count) < 0:
            raise DataError(f"Client {cell.client} takes away more rows of class {label} than it has.")
        sums = self.vectors[cell.start] + by.sums[label]
        if float(sums.double().norm()) > int(count) * self.config.limit * (1 + 1e-9) or (
            self.nonnegative and bool((sums < 0).any())
        ):
            raise DataError(f"Client {cell.client} reports changes of class {label} that leave sums no rows have.")
        self.vectors[cell.start] = sums
        self.counts[cell.start] = count.to(self.counts)
        self.total = self.total + one_class(by, label, second)
        self._check(self.total, f"The total with the change of cell {name}")
        for part, key in ((self.of_clients, cell.client), (self.of_classes, label), (self.of_cells, name)):
            if key in part and not (part is self.of_classes and cell.client in self.unsent):
                part[key] = part[key] + second  # type: ignore[index]

    def purge(self, forget_set: Forget, cells: Collection[Cell]) -> None:
        """Destroy what is kept of these clients and classes.

        Second moments that cannot be told from what is destroyed are destroyed with it: clients are asked for theirs
        when they are needed next.
        """
        left = self.retained(forget_set)
        named = {cell.name for cell in cells if int(self.counts[cell.start])}
        for client, label in named:
            for part, key, gone in (
                (self.of_clients, client, client in forget_set.client_ids),
                (self.of_classes, label, label in forget_set.class_ids),
            ):
                known = self.of_cells.get((client, label))
                if part is self.of_classes and client in self.unsent and not gone:
                    continue
                if gone or known is None:
                    part.pop(key, None)
                elif key in part:
                    part[key] = part[key] - known
        for name in named:
            self.of_cells.pop(name, None)
        self.sealed_second.clear()
        self.total = left
        super().purge(forget_set, cells)
