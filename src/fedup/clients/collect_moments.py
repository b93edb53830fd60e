"""Phase 2 with moments: every client is asked, once, for sums that add up."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedup.clients.labels import LabelsQuestion
from fedup.clients.moments import ClientMoments, MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import CutError, DataError
from fedup.federation import Federation
from fedup.filters.closed_form import Scores, last_layer
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint
from fedup.request import Forget, union
from fedup.statistics.cell_table import CellTable
from fedup.statistics.client_parts import ClientPart, ClientParts
from fedup.statistics.integer_moments import MOST_STEPS, IntegerMoments, MomentConfig, diagonal_of
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName

_SHORTENED = 0.01  # share of rows beyond the bound, above which another bound is tried where nobody chose one
_FINE = 4  # steps in the root mean square of a feature, below which the grid is too coarse
_TRIES = 4
_CLIPPED = 0.001  # share of rows with a value beyond its bound, above which a wider bound is tried
_FINE_VALUES = 64  # steps in the root mean square of values, below which their bound is too wide


@torch.inference_mode(False)  # what is stored must stay writable
def collect_moments(
    model: nn.Module, contact: Contact, config: MomentConfig, cut: str, requests: frozenset[Forget]
) -> MomentStore:
    """The clients' moments without what the requests name.

    Where nobody chose a bound and the usual one shortens many rows, or is far too wide, all are asked again with a
    better one.
    """
    head = _check_head(model, contact, cut)
    targets = contact.targets
    config = replace(config, targets=targets, outputs=0 if targets == "classes" else contact.num_classes)
    forget_set = union(requests)
    for request in (*requests, *([forget_set] if requests else [])):
        contact.check(request)
    if contact.ledger.budgets:  # before anybody tells of which class a sample is
        contact.ledger.check_exact([client for client in contact.clients if client not in forget_set.client_ids])
    before = contact.traffic
    labels = dict(contact.ask({client: LabelsQuestion(ids) for client, ids in forget_set.sample_ids.items()}))
    adapts = config.is_usual_grid, config.is_usual_value_bound
    for _ in range(_TRIES if targets != "values" else 2 * _TRIES):
        builder = StoreBuilder(config, contact.num_classes, forget_set, labels, contact.vectors_folder)
        for answer in _ask(contact, config, cut, forget_set):
            width = answer.moments.width - config.outputs
            if width != head.weight.shape[1]:
                raise CutError(
                    f"The last layer {cut!r} has {head.weight.shape[1]} inputs, and a row has {width} "
                    f"features there, in shape {answer.shape}: collect centroids (statistics='centroids')."
                )
            builder.add(answer)
        better = builder.better_config(*adapts)
        if better == config:
            break
        config = better
    else:
        raise DataError(
            f"No grid suits the features{' and values' if targets == 'values' else ''}: they are far from "
            f"{MomentConfig.bound:g} in length, or all zero. Choose one: statistics=MomentConfig(bound=…, step=…"
            f"{', value_bound=…' if targets == 'values' else ''})."
        )
    store = builder.finish(cut=cut, base=fingerprint(model), collected_for=requests, ledger=contact.ledger)
    store.traffic = contact.traffic - before
    store.bytes_up = dict(store.traffic.by_client)
    return store


def suits_moments(model: nn.Module, contact: Contact | Federation, cut: str | None) -> bool:
    """Whether a closed form could be served at this cut, so that moments are of use."""
    try:
        _check_head(model, contact, find_cut(model, cut))
    except CutError:
        return False
    return True


def _check_head(model: nn.Module, contact: Contact | Federation, cut: str) -> Scores:
    head = last_layer(model, cut, contact.targets)  # raises where a closed form could not be served
    if len(head.weight) != contact.num_classes:
        raise CutError(
            f"The last layer has {len(head.weight)} outputs for {contact.num_classes} {contact.targets}: moments need "
            "as many."
        )
    return head


def _ask(contact: Contact, config: MomentConfig, cut: str, forget_set: Forget) -> Iterator[ClientMoments]:
    without = forget_set.class_ids if config.targets == "classes" else frozenset()  # rows with a label stay
    question = MomentsQuestion(cut, config, without=without)
    instead = {client: replace(question, excluded=ids) for client, ids in forget_set.sample_ids.items()}
    return (answer for _, answer in contact.ask_everyone(question, instead=instead, but=forget_set.client_ids))


_SCALE = np.dtype(
    {
        "names": [
            "rows",
            "shortened",  # rows beyond the bound
            "clipped",  # rows with a value beyond its bound
            "square",  # mean square length of features
            "values",  # mean square of the largest value
        ],
        "formats": ["f8"] * 5,
    }
)  # how one client's rows fit the grid


def of_usual_clients(some: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    """Some of the rows, and all rows, added up over clients without the quarter with the largest shares of them: a
    quarter of the clients cannot decide what suits the others.

    >>> of_usual_clients(np.array([0, 10, 1, 0]), np.array([10, 10, 10, 10]))
    (1, 30)
    """
    usual = np.argsort(some / rows, kind="stable")[: -(-3 * len(rows) // 4)]
    return int(some[usual].sum()), int(rows[usual].sum())


class StoreBuilder:
    """A store that grows with each client's answer; one answer at a time is in memory."""

    def __init__(
        self,
        config: MomentConfig,
        num_classes: int,
        forget_set: Forget,
        sample_labels: dict[int, dict[int, int]],
        folder: Path | None,
    ) -> None:
        self._config, self._num_classes, self._folder = config, num_classes, folder
        self._forget_set, self._sample_labels = forget_set, sample_labels
        self._total: IntegerMoments | None = None
        self._parts = ClientParts(0)
        self._of_classes: dict[int, Tensor] = {}
        self._clients, self._cells_of = array("Q"), array("q")  # and how many cells each has
        self._labels, self._counts = array("q"), array("q")  # of their cells
        self._unsent: set[int] = set()
        self._few: dict[int, set[int]] = {}  # by class
        self._shortened, self._clipped, self._unreported = 0, 0, dict[int, int]()
        self._scale_numbers = array("d")  # five of each client with rows
        self._about: dict[str, Any] = {}

    def add(self, answer: ClientMoments) -> None:
        """Add a client's answer to the totals, and keep its part."""
        moments, client = answer.moments, answer.client
        if self._total is None:
            self._total = IntegerMoments.zeros(self._config.cells(self._num_classes), moments.width)
            self._parts = ClientParts(moments.width, self._folder)
            self._about = {"shape": answer.shape, "nonnegative": answer.nonnegative}
        self._total.add_(moments)
        for label, second in answer.by_class.items():
            self._of_classes[label] = self._of_classes.get(label, 0) + second
        named = {*self._sample_labels.get(client, {}).values()} - self._forget_set.class_ids
        held = sorted({*moments.held, *named})  # samples may take out a whole cell
        self._clients.append(client)
        self._cells_of.append(len(held))
        self._labels.extend(held)
        self._counts.extend(moments.counts.numpy()[held].tolist())
        if held:
            self._parts[client] = ClientPart(moments.sums[held], moments.second)
        rows = moments.rows
        if rows and not answer.by_class:
            self._unsent.add(client)
        for label in answer.few:
            self._few.setdefault(label, set()).add(client)
        if rows:
            squares = diagonal_of(moments.second, moments.width) / rows
            inputs = moments.width - self._config.outputs
            square, values = float(squares[:inputs].sum()), max(squares[inputs:].tolist(), default=0.0)
            self._scale_numbers.extend((rows, answer.shortened, answer.clipped, square, values))
        self._shortened += answer.shortened
        self._clipped += answer.clipped
        if answer.unreported:
            self._unreported[client] = answer.unreported

    def better_config(self, features: bool, values: bool) -> MomentConfig:
        """The same, or one that suits the rows, their features or their values: wider or finer. A quarter of the
        clients cannot decide that, whatever they report."""
        config, total = self._config, self._total
        if total is None or not total.rows:
            return config
        if values and config.targets == "values":
            config = replace(config, value_bound=config.value_bound * self._value_factor())
        if not features:
            return config
        shortened, rows = self.usual_shortened
        if shortened > _SHORTENED * rows:
            return replace(config, bound=8 * config.bound, step=8 * config.step)
        if float(np.median(self._scales["square"])) ** 0.5 < _FINE * (total.width - config.outputs) ** 0.5:
            step = config.step / 8
            return replace(config, bound=min(config.bound, step * MOST_STEPS), step=step)
        return config

    @property
    def _scales(self) -> np.ndarray:
        return np.array(self._scale_numbers).view(_SCALE)

    @property
    def usual_shortened(self) -> tuple[int, int]:
        """Rows beyond the bound, and all rows, of the usual clients."""
        return of_usual_clients(self._scales["shortened"], self._scales["rows"])

    def _value_factor(self) -> float:
        """By how much another bound would suit the values better."""
        clipped, rows = of_usual_clients(self._scales["clipped"], self._scales["rows"])
        if clipped > _CLIPPED * rows:
            return 16.0
        return 1 / 16 if 0 < float(np.median(self._scales["values"])) ** 0.5 < _FINE_VALUES else 1.0

    def finish(self, **about: Any) -> MomentStore:
        """The store of all that was added."""
        total = self._total
        if total is None or not total.rows:
            raise DataError(f"No client has {self._config.least_rows} rows of a class: there is nothing to keep.")
        total.check(self._config)
        clients, labels, rows = self._columns()
        cells = CellTable(clients, labels)
        counts, excluded = torch.from_numpy(rows), self._excluded(cells)
        sizes = counts.clone()
        for name, ids in excluded.items():
            cell = cells.find(name)
            if cell is not None and int(counts[cell.start]):
                sizes[cell.start] += len(ids)
        return MomentStore(
            vectors=torch.zeros(0, total.width, dtype=torch.int64),
            counts=counts,
            cells=cells,
            clients=tuple(sorted({*self._clients, *self._forget_set.client_ids})),
            num_classes=self._num_classes,
            how=self._config,
            excluded=excluded,
            sample_labels=self._sample_labels,
            total=total,
            parts=self._parts,
            of_classes=self._of_classes,
            unsent=self._unsent,
            sizes=sizes,
            few=self._few,
            shortened=self._shortened,
            unreported=self._unreported,
            clipped=self._clipped,
            **self._about,
            **about,
        )

    def _columns(self) -> "tuple[array[int], array[int], np.ndarray]":
        """Of all cells, sorted by client and class: the client, the class, the rows."""
        sizes = np.frombuffer(self._cells_of, dtype=np.int64)
        clients = np.frombuffer(self._clients, dtype=np.uint64).repeat(sizes)
        labels, rows = self._labels, np.frombuffer(self._counts, dtype=np.int64)
        if (clients[1:] < clients[:-1]).any():  # contacts answer in the order of the clients
            order = clients.argsort(kind="stable")
            clients, labels, rows = clients[order], array("q", (labels[i] for i in order)), rows[order]
        of_cells = array("Q")
        of_cells.frombytes(clients.view(np.uint8).data)
        return of_cells, labels, rows.copy()

    def _excluded(self, cells: CellTable) -> dict[CellName, frozenset[int]]:
        """By cell, the samples that are left out of it."""
        excluded: dict[CellName, frozenset[int]] = {}
        for client, ids in self._forget_set.sample_ids.items():
            labels = self._sample_labels.get(client, {})
            for label in cells.labels(client):
                excluded[client, label] = frozenset(i for i in ids if labels.get(i) == label)
        return {name: ids for name, ids in excluded.items() if ids}
