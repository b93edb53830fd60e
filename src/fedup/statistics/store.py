"""Phase 2: the server's store of the centroids of each (client, class) cell."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError, DataError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.traffic import Traffic

CellName = tuple[int, int]  # (client, class)
_PLAIN = ("num_classes", "cut", "base", "nonnegative")  # fields that are stored as they are


@dataclass(frozen=True, slots=True)
class Cell:
    """A slot of the store: rows start … start + size hold the centroids of one class of one client."""

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


@dataclass(eq=False)
class Centroids:
    """All centroids at the server; under DP, noisy statistics in their place.

    A row with count 0 is empty: purged, or its cell has fewer centroids now.

    Only `put` changes the content of a slot. The old content is not kept (the difference would reveal what was
    forgotten), unless it goes into `sealed`.
    """

    vectors: Tensor  # (M, D); under DP (M, numbers of a class's statistics)
    counts: Tensor  # (M,) points behind each centroid; under DP 1 for a message
    cells: tuple[Cell, ...]  # sorted by (client, class)
    clients: tuple[int, ...]
    num_classes: int
    how: CentroidConfig | DP
    cut: str
    base: str  # fingerprint of the model that made the features
    nonnegative: bool
    shape: tuple[int, ...]  # of one row's features at the cut, D in all
    collected_for: frozenset[Forget] = frozenset()  # requests already left out when the clients were asked
    open: set[Forget] = field(default_factory=set)  # withdrawn samples without a filter: left out all the same
    excluded: dict[CellName, frozenset[int]] = field(default_factory=dict)  # sample ids left out of a cell
    sample_labels: dict[int, dict[int, int]] = field(default_factory=dict)  # by client: known classes of samples
    purged: set[CellName] = field(default_factory=set)
    sealed: dict[CellName, tuple[Tensor, Tensor]] = field(default_factory=dict)  # originals kept for restoration
    bytes_up: dict[int, int] = field(default_factory=dict)  # by client: all that it sent, as serialised
    paper_epsilons: dict[CellName, float] = field(default_factory=dict)  # if counted; not a DP guarantee
    ledger: Ledger = field(default_factory=Ledger)  # what the clients have spent under DP
    traffic: Traffic = field(default_factory=Traffic)  # of the collection; not saved to files

    def __post_init__(self) -> None:
        self._by_name = {cell.name: cell for cell in self.cells}
        self._by_client: dict[int, list[Cell]] = {}
        for cell in self.cells:
            self._by_client.setdefault(cell.client, []).append(cell)

    @property
    def dp(self) -> DP | None:
        """The guarantee of the clients' releases; None for centroids."""
        return self.how if isinstance(self.how, DP) else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the clients' messages together, as serialised."""
        return sum(self.bytes_up.values())

    def to(self, device: torch.device | str) -> Self:
        """An independent copy with its arrays on a device.

        Changes to one never show in the other. Each ledger knows its own charges alone, so work with one of the two.
        Only a ledger that is kept elsewhere (a run folder's) is shared by both.
        """
        return replace(self, **{part.name: _copied(getattr(self, part.name), device) for part in fields(self)})

    def cell(self, name: CellName) -> Cell | None:
        """The slot of a cell, or None if that client has no row of that class."""
        return self._by_name.get(name)

    def cells_of(self, client: int) -> Sequence[Cell]:
        """The slots of a client."""
        return self._by_client.get(client, ())

    def row_labels(self) -> Tensor:
        """The class of each row's cell. (M,)"""
        return self._per_row([cell.label for cell in self.cells])

    def rows_of(self, cells: Iterable[Cell]) -> Tensor:
        """The filled rows of these cells."""
        chosen = {cell.name for cell in cells}
        named = self._per_row([cell.name in chosen for cell in self.cells])
        return (named & (self.counts > 0)).nonzero().flatten()

    def _per_row(self, values: list[int]) -> Tensor:
        """One value per cell, repeated for each row of the cell. (M,)"""
        sizes = torch.tensor([cell.size for cell in self.cells])
        return torch.tensor(values).repeat_interleave(sizes).to(self.vectors.device)

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


def _copied(value: Any, device: torch.device | str) -> Any:
    """A deep copy of whatever can change, tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, Ledger):
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


def save_centroids(store: Centroids, path: str | Path) -> None:
    """Write the store to a file, sealed originals included."""
    sealed = sorted(store.sealed)
    tensors = {"vectors": store.vectors, "counts": store.counts}
    for i, name in enumerate(sealed):
        tensors[f"sealed.{i}.vectors"], tensors[f"sealed.{i}.counts"] = store.sealed[name]
    header: dict[str, Any] = {
        "cells": [[cell.client, cell.label, cell.start, cell.size] for cell in store.cells],
        "clients": list(store.clients),
        **{name: getattr(store, name) for name in _PLAIN},
        "how": asdict(store.how),
        "shape": list(store.shape),
        "collected_for": sorted((request.to_json() for request in store.collected_for), key=str),
        "open": sorted((request.to_json() for request in store.open), key=str),
        "excluded": [[*name, sorted(ids)] for name, ids in sorted(store.excluded.items())],
        "sample_labels": [[client, *pair] for client, of in sorted(store.sample_labels.items()) for pair in of.items()],
        "purged": sorted(map(list, store.purged)),
        "sealed": list(map(list, sealed)),
        "bytes_up": {str(client): size for client, size in store.bytes_up.items()},
        "paper_epsilons": [[*name, epsilon] for name, epsilon in sorted(store.paper_epsilons.items())],
        "ledger": store.ledger.to_json(),
    }
    save_tensors(path, tensors, kind="centroids", header=header)


def load_centroids(path: str | Path) -> Centroids:
    """Read a store back; raises on a file whose parts do not fit together."""
    tensors, header = load_tensors(path, kind="centroids")
    try:
        cells = tuple(Cell(*cell) for cell in header["cells"])
        store = Centroids(
            vectors=tensors["vectors"],
            counts=tensors["counts"],
            cells=cells,
            clients=tuple(header["clients"]),
            **{name: header[name] for name in _PLAIN},
            how=how_from(header["how"]),
            shape=tuple(header["shape"]),
            collected_for=frozenset(map(Forget.from_json, header["collected_for"])),
            open=set(map(Forget.from_json, header["open"])),
            excluded={(client, label): frozenset(ids) for client, label, ids in header["excluded"]},
            sample_labels=_by_client(header["sample_labels"]),
            purged={(client, label) for client, label in header["purged"]},
            sealed={
                (client, label): (tensors[f"sealed.{i}.vectors"], tensors[f"sealed.{i}.counts"])
                for i, (client, label) in enumerate(header["sealed"])
            },
            bytes_up={int(client): size for client, size in header["bytes_up"].items()},
            paper_epsilons={(client, label): value for client, label, value in header["paper_epsilons"]},
            ledger=Ledger.from_json(header["ledger"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} lacks a part of a centroid store ({error!r}). Take a good copy of it.") from error
    rows = sum(cell.size for cell in cells)
    if store.vectors.ndim != 2 or len(store.vectors) != rows or store.counts.shape != (rows,):
        raise ArtifactError(f"{path} has {tuple(store.vectors.shape)} vectors for {rows} rows of cells: it is damaged.")
    return store


def how_from(plain: dict[str, Any]) -> CentroidConfig | DP:
    """How clients made their statistics, from plain data."""
    return DP(**plain) if "epsilon" in plain else CentroidConfig(**plain)


def _by_client(triples: list[list[int]]) -> dict[int, dict[int, int]]:
    labels: dict[int, dict[int, int]] = {}
    for client, sample, label in triples:
        labels.setdefault(client, {})[sample] = label
    return labels
