"""The server's store on disk: one file, whatever clients sent."""

import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.statistics.cell_table import CellTable
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.kept_eraser import loaded_parts, parts_to_save
from fedup.statistics.moment_file import (
    PARTS,
    cells_to_save,
    check_moments,
    loaded_cells,
    loaded_moments,
    moments_to_save,
)
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids

_PLAIN = ("num_classes", "cut", "base", "nonnegative")  # fields that are stored as they are


def save_centroids(store: Centroids, path: str | Path) -> None:
    """Write the store to a file, sealed originals included."""
    sealed = sorted(store.sealed)
    tensors = {"vectors": store.vectors, "counts": store.counts}
    for i, name in enumerate(sealed):
        tensors[f"sealed.{i}.vectors"], tensors[f"sealed.{i}.counts"] = store.sealed[name]
    header: dict[str, Any] = {
        "clients": list(store.clients),
        **{name: getattr(store, name) for name in _PLAIN},
        "how": asdict(store.how),
        "shape": list(store.shape),
        "collected_for": sorted((request.to_json() for request in store.collected_for), key=str),
        "finished": store.finished.to_json(),
        "open": sorted((request.to_json() for request in store.open), key=str),
        "excluded": [[*name, sorted(ids)] for name, ids in sorted(store.excluded.items())],
        "sample_labels": [[client, *pair] for client, of in sorted(store.sample_labels.items()) for pair in of.items()],
        "purged": sorted(map(list, store.purged)),
        "sealed": list(map(list, sealed)),
        "paper_epsilons": [[*name, epsilon] for name, epsilon in sorted(store.paper_epsilons.items())],
        "ledger": store.ledger.terms_to_json(),
        "pending": {str(client): sorted(labels) for client, labels in sorted(store.pending.items())},
        "renewed": store.renewed,
        "unnamed": {str(client): sorted(tags) for client, tags in sorted(store.unnamed.items())},
    }
    erased, header["erased"] = parts_to_save(store.eraser_parts)
    tensors |= erased | {"ledger.charges": _packed(store.ledger.charge_rows()), "bytes_up": _packed(_sizes(store))}
    long = None
    if isinstance(store, MomentStore):
        own_tensors, own_header, long = moments_to_save(store)
        tensors, header = tensors | own_tensors, header | own_header
    else:
        tensors |= cells_to_save(store)
    save_tensors(path, tensors, kind="centroids", header=header, long=long)


def load_centroids(path: str | Path) -> Centroids:
    """Read a store back; raises on a file whose parts do not fit together.

    If another process saves a store in its place meanwhile, the new one is read.
    """
    while True:
        version = _version(path)
        try:
            return _loaded(path)
        except ArtifactError:
            if _version(path) == version:
                raise


def _version(path: str | Path) -> tuple[int, ...]:
    """Numbers that change when the file is replaced."""
    with suppress(OSError):
        about = Path(path).stat()
        return about.st_ino, about.st_mtime_ns, about.st_size
    return ()


def _loaded(path: str | Path) -> Centroids:
    tensors, header = load_tensors(path, kind="centroids", but=PARTS)
    if "of_clients" in header or "cells" in header or "finished" not in header:
        raise ArtifactError(f"{path} holds statistics as an earlier fedup wrote them: collect again.")
    try:
        how = how_from(header["how"])
        if isinstance(how, MomentConfig):
            own = loaded_moments(Path(path), tensors, header)
        else:
            own = {"cells": loaded_cells(tensors)}
        store = (MomentStore if isinstance(how, MomentConfig) else Centroids)(
            vectors=tensors["vectors"],
            counts=tensors["counts"],
            clients=tuple(header["clients"]),
            **{name: header[name] for name in _PLAIN},
            how=how,
            shape=tuple(header["shape"]),
            collected_for=frozenset(map(Forget.from_json, header["collected_for"])),
            finished=Forget.from_json(header["finished"]),
            open=set(map(Forget.from_json, header["open"])),
            excluded={(client, label): frozenset(ids) for client, label, ids in header["excluded"]},
            sample_labels=_by_client(header["sample_labels"]),
            purged={(client, label) for client, label in header["purged"]},
            sealed={
                (client, label): (tensors[f"sealed.{i}.vectors"], tensors[f"sealed.{i}.counts"])
                for i, (client, label) in enumerate(header["sealed"])
            },
            bytes_up=_bytes_up(tensors, header),
            paper_epsilons={(client, label): value for client, label, value in header["paper_epsilons"]},
            ledger=_ledger(path, tensors, header),
            pending={int(client): frozenset(labels) for client, labels in header["pending"].items()},
            renewed=int(header["renewed"]),
            unnamed={int(client): frozenset(tags) for client, tags in header["unnamed"].items()},
            eraser_parts=loaded_parts(tensors, header["erased"]),
            **own,
        )
        if isinstance(store, MomentStore):
            check_moments(store)
            return store
        rows = CellTable.of(store.cells).num_rows
    except ArtifactError:
        raise
    except OSError as error:  # another process replaced it meanwhile
        raise ArtifactError(f"{path} cannot be read ({error.strerror}). Take a good copy of it.") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise ArtifactError(f"{path} lacks a part of a centroid store ({error!r}). Take a good copy of it.") from error
    if store.vectors.ndim != 2 or len(store.vectors) != rows or store.counts.shape != (rows,):
        raise ArtifactError(f"{path} has {tuple(store.vectors.shape)} vectors for {rows} rows of cells: it is damaged.")
    return store


def _sizes(store: Centroids) -> Iterator[list[int]]:
    return ([client, size] for client, size in store.bytes_up.items())


def _packed(rows: Iterable[list[Any]]) -> Tensor:
    """Rows of plain data, one on each line, compressed: those of very many clients are long for a header."""
    packer, packed = zlib.compressobj(1), bytearray()
    for row in rows:
        packed += packer.compress(json.dumps(row).encode() + b"\n")
    return torch.frombuffer(packed + packer.flush(), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Iterator[list[Any]]:
    """The opposite."""
    try:
        text = zlib.decompress(packed.numpy().tobytes())
    except zlib.error as error:
        raise ValueError(f"lines that cannot be unpacked: {error}") from error
    return map(json.loads, text.splitlines())


def _bytes_up(tensors: dict[str, Tensor], header: dict[str, Any]) -> dict[int, int]:
    if "bytes_up" in header:  # of an earlier fedup
        return {int(client): size for client, size in header["bytes_up"].items()}
    return {int(client): int(size) for client, size in _unpacked(tensors["bytes_up"])}


def _ledger(path: str | Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> Ledger:
    plain = header["ledger"]
    if "charges" not in plain:  # else of an earlier fedup
        plain = {**plain, "charges": _unpacked(tensors["ledger.charges"])}
    try:
        return Ledger.from_json(plain)
    except ArtifactError as error:
        raise ArtifactError(f"{path} is damaged. {error}") from error


def how_from(plain: dict[str, Any]) -> CentroidConfig | DP | MomentConfig:
    """How clients made their statistics, from plain data."""
    kind = DP if "epsilon" in plain else MomentConfig if "bound" in plain else CentroidConfig
    return kind(**plain)


def _by_client(triples: list[list[int]]) -> dict[int, dict[int, int]]:
    labels: dict[int, dict[int, int]] = {}
    for client, sample, label in triples:
        labels.setdefault(client, {})[sample] = label
    return labels
