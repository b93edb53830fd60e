"""The server's store on disk: one file, whatever clients sent."""

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
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Cell, Centroids

_PLAIN = ("num_classes", "cut", "base", "nonnegative")  # fields that are stored as they are
_SECOND = ("of_clients", "of_classes", "of_cells", "sealed_second")  # second moments of a `MomentStore` store


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
    if isinstance(store, MomentStore):
        _add_moments(store, tensors, header)
    save_tensors(path, tensors, kind="centroids", header=header)


def load_centroids(path: str | Path) -> Centroids:
    """Read a store back; raises on a file whose parts do not fit together."""
    tensors, header = load_tensors(path, kind="centroids")
    try:
        cells = tuple(Cell(*cell) for cell in header["cells"])
        rows = sum(cell.size for cell in cells)
        how = how_from(header["how"])
        store = (MomentStore if isinstance(how, MomentConfig) else Centroids)(
            vectors=tensors["vectors"],
            counts=tensors["counts"],
            cells=cells,
            clients=tuple(header["clients"]),
            **{name: header[name] for name in _PLAIN},
            how=how,
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
            **(_moments(tensors, header) if isinstance(how, MomentConfig) else {}),
        )
        if isinstance(store, MomentStore):
            _check_moments(store)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path} lacks a part of a centroid store ({error!r}). Take a good copy of it.") from error
    if store.vectors.ndim != 2 or len(store.vectors) != rows or store.counts.shape != (rows,):
        raise ArtifactError(f"{path} has {tuple(store.vectors.shape)} vectors for {rows} rows of cells: it is damaged.")
    return store


def how_from(plain: dict[str, Any]) -> CentroidConfig | DP | MomentConfig:
    """How clients made their statistics, from plain data."""
    kind = DP if "epsilon" in plain else MomentConfig if "bound" in plain else CentroidConfig
    return kind(**plain)


def _add_moments(store: MomentStore, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Totals and second moments beside the cells: one matrix a part, its rows named in the header."""
    header |= {"shortened": store.shortened, "unreported": store.unreported, "unsent": sorted(store.unsent)}
    header |= {"few": sorted(store.few), "sizes": [[*name, rows] for name, rows in sorted(store.sizes.items())]}
    tensors |= {f"total.{name}": getattr(store.total, name) for name in ("counts", "sums", "second")}
    for part in _SECOND:
        seconds = getattr(store, part)
        header[part] = sorted(seconds)
        tensors |= {f"{part}.{i}": seconds[name] for i, name in enumerate(header[part])}


def _moments(tensors: dict[str, Tensor], header: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {
        part: {
            tuple(name) if isinstance(name, list) else name: tensors[f"{part}.{i}"]
            for i, name in enumerate(header[part])
        }
        for part in _SECOND
    }
    total = IntegerMoments(*(tensors[f"total.{name}"] for name in ("counts", "sums", "second")))
    about = {"shortened": header["shortened"], "unreported": header["unreported"], "unsent": set(header["unsent"])}
    sizes = {(client, label): rows for client, label, rows in header["sizes"]}
    return {"total": total, "sizes": sizes, "few": set(header["few"]), **about, **parts}


def _check_moments(store: MomentStore) -> None:
    """Raise unless all parts fit each other."""
    classes, width = store.num_classes, store.vectors.shape[1]
    added = IntegerMoments.zeros(classes, width)
    triangles = [*(second for part in _SECOND for second in getattr(store, part).values()), store.total.second]
    labels = torch.tensor([cell.label for cell in store.cells])
    fits = (
        store.vectors.dtype == store.counts.dtype == store.total.counts.dtype == store.total.sums.dtype == torch.int64
        and all(each.dtype == torch.int64 and each.shape == added.second.shape for each in triangles)
        and store.total.counts.shape == added.counts.shape
        and store.total.sums.shape == added.sums.shape
        and all(cell.size == 1 and 0 <= cell.label < classes for cell in store.cells)
        and {*store.of_clients, *store.unsent} <= set(store.clients)
        and store.of_classes.keys() | store.few <= set(range(classes))
        and all(store.cell(name) is not None for name in (*store.of_cells, *store.sizes))
        and store.sealed.keys() == store.sealed_second.keys()
    )
    if fits:
        added.counts.index_add_(0, labels, store.counts)
        added.sums.index_add_(0, labels, store.vectors)
    if not fits or not torch.equal(added.counts, store.total.counts) or not torch.equal(added.sums, store.total.sums):
        raise ValueError("its moments do not fit each other")
    store.total.check(store.config)


def _by_client(triples: list[list[int]]) -> dict[int, dict[int, int]]:
    labels: dict[int, dict[int, int]] = {}
    for client, sample, label in triples:
        labels.setdefault(client, {})[sample] = label
    return labels
