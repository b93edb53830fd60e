"""Moments in the file of a store: totals and an index, and behind them the parts of all clients, one by one."""

import math
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedup.artifacts import LongTensor, find_long_tensor
from fedup.errors import DataError
from fedup.statistics.cell_table import CellTable
from fedup.statistics.client_parts import ClientParts, PartsFile, Place, numbers_of
from fedup.statistics.integer_moments import IntegerMoments
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids

PARTS = "parts.numbers"
_SECOND = ("of_classes", "of_cells", "sealed_second")  # second moments by name
_TOTAL = ("counts", "sums", "second")


def moments_to_save(store: MomentStore) -> tuple[dict[str, Tensor], dict[str, Any], LongTensor]:
    """Tensors, header and the parts of all clients."""
    header: dict[str, Any] = {
        "unsent": sorted(store.unsent),
        "few": {str(label): sorted(clients) for label, clients in sorted(store.few.items())},
        "shortened": store.shortened,
        "unreported": {str(client): rows for client, rows in sorted(store.unreported.items())},
    }
    clients, labels = (_tensor_of(column) for column in store.cell_columns)
    tensors = {"cells.clients": clients, "cells.labels": labels, "sizes": store.sizes}
    tensors |= {f"total.{name}": getattr(store.total, name) for name in _TOTAL}
    for part in _SECOND:
        seconds = getattr(store, part)
        header[part] = sorted(seconds)
        tensors |= {f"{part}.{i}": seconds[name] for i, name in enumerate(header[part])}
    parts, senders = store.parts, array("Q", store.parts)
    tensors["parts.clients"] = _tensor_of(senders)
    digests, second, long = bytearray(), array("B"), array("B")
    for place in map(parts.place, senders):
        digests += place.digest
        second.append(place.has_second)
        long.append(place.size == 8 * numbers_of(store.total.width, place.cells, place.has_second))
    columns = {"digests": digests, "second": second, "long": long}
    for name, column in columns.items():
        flat = torch.frombuffer(column, dtype=torch.uint8) if column else torch.zeros(0, dtype=torch.uint8)
        tensors[f"parts.{name}"] = flat if name == "digests" else flat.bool()
    blocks = (place.file.read(place, client) for client in senders for place in [parts.place(client)])
    return tensors, header, LongTensor(PARTS, parts.nbytes, blocks)


def loaded_moments(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> dict[str, Any]:
    """The fields that moments have beyond those of every store."""
    cells = CellTable(_clients_in(tensors["cells.clients"]), tensors["cells.labels"].tolist())
    named: dict[str, Any] = {
        part: {
            tuple(name) if isinstance(name, list) else name: tensors[f"{part}.{i}"]
            for i, name in enumerate(header[part])
        }
        for part in _SECOND
    }
    return {
        "cells": cells,
        "total": IntegerMoments(*(tensors[f"total.{name}"] for name in _TOTAL)),
        "parts": _parts(path, tensors, cells),
        "sizes": tensors["sizes"],
        "unsent": set(header["unsent"]),
        "few": {int(label): set(clients) for label, clients in header["few"].items()},
        "shortened": header["shortened"],
        "unreported": {int(client): rows for client, rows in header["unreported"].items()},
        "clipped": header.get("clipped", 0),
        **named,
    }


def cells_to_save(store: Centroids) -> dict[str, Tensor]:
    """The cells of centroids, in columns."""
    table = CellTable.of(store.cells)
    clients, labels = (_tensor_of(column) for column in table.columns)
    return {"cells.clients": clients, "cells.labels": labels, "cells.sizes": table.sizes}


def loaded_cells(tensors: dict[str, Tensor]) -> CellTable:
    """The opposite."""
    clients, labels, sizes = (tensors[f"cells.{name}"] for name in ("clients", "labels", "sizes"))
    return CellTable(_clients_in(clients), labels.tolist(), sizes.tolist())


def _tensor_of(column: "array[int]") -> Tensor:
    """The bits of a column as 64-bit integers, which every version of the format knows."""
    return torch.frombuffer(column, dtype=torch.int64) if column else torch.zeros(0, dtype=torch.int64)


def _clients_in(column: Tensor) -> "array[int]":
    """The opposite, for numbers of clients: they have no sign."""
    if column.dtype != torch.int64:
        raise DataError("the numbers of its clients are of another type")
    return array("Q", column.numpy().tobytes())


def _parts(path: Path, tensors: dict[str, Tensor], cells: CellTable) -> ClientParts:
    width, (start, size_bytes) = tensors["total.sums"].shape[1], find_long_tensor(path, PARTS)
    parts, file, offset = ClientParts(width, path.parent), PartsFile(saved=path, start=start), 0
    clients, known = _clients_in(tensors["parts.clients"]), tensors["parts.second"].tolist()
    long = tensors.get("parts.long", torch.ones(len(clients))).tolist()  # an earlier fedup wrote 64 bits always
    digests = tensors["parts.digests"].numpy().tobytes()
    for i, (client, second, is_long) in enumerate(zip(clients, known, long, strict=True)):
        rows = len(cells.labels(client))
        size = (8 if is_long else 4) * numbers_of(width, rows, second)
        parts.put_place(client, Place(file, offset, size, rows, second, digests[32 * i : 32 * i + 32]))
        offset += size
    if offset != size_bytes or len(parts) != len(clients) or not all(map(cells.labels, clients)):
        raise DataError("the parts of its clients have other sizes than its cells")
    return parts


def check_moments(store: MomentStore) -> None:
    """Raise unless all parts fit each other. Reads every client's part, one at a time."""
    classes, width, cells = store.config.cells(store.num_classes), store.total.width, len(store.cells)
    zeros = IntegerMoments.zeros(classes, width)
    triangles = [*(second for part in _SECOND for second in getattr(store, part).values()), store.total.second]
    clients, _ = store.cell_columns
    fits = (
        store.counts.dtype == store.sizes.dtype == store.total.counts.dtype == store.total.sums.dtype == torch.int64
        and store.vectors.shape == (0, width)
        and store.counts.shape == store.sizes.shape == (cells,)
        and all(each.dtype == torch.int64 and each.shape == zeros.second.shape for each in triangles)
        and store.total.counts.shape == zeros.counts.shape
        and store.total.sums.shape == zeros.sums.shape
        and width == math.prod(store.shape) + store.config.outputs
        and store.config.outputs in (0, store.num_classes)
        and not bool((store.counts < 0).any())
        and all(0 <= label < classes for label in store.classes_held())
        and {*clients, *store.unsent} <= store.known_clients
        and store.of_classes.keys() | store.few.keys() <= set(range(classes))
        and all(store.cell(name) is not None for name in (*store.of_cells, *store.sealed))
        and store.sealed.keys() == store.sealed_second.keys()
        and all(each.shape == (1, width) and rows.shape == (1,) for each, rows in store.sealed.values())
        and all(each.dtype == torch.int64 for sealed in store.sealed.values() for each in sealed)
    )
    if not fits or not _adds_up(store):
        raise DataError("its moments do not fit each other")
    store.total.check(store.config)


def _adds_up(store: MomentStore) -> bool:
    """Whether the totals are those of the clients' parts; second moments, where all are known."""
    added, filled = IntegerMoments.zeros(*store.total.sums.shape), int((store.counts > 0).sum())
    every_second = True
    for client in store.parts:
        own = store.moments_of(client)
        added, filled = added + own, filled - int((own.counts > 0).sum())
        every_second &= store.parts.has_second(client)
    same = torch.equal(added.counts, store.total.counts) and torch.equal(added.sums, store.total.sums)
    return filled == 0 and same and (not every_second or torch.equal(added.second, store.total.second))
