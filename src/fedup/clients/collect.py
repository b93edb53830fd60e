"""Phase 2 in one call: every client is asked, once, for what the server keeps of it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Literal, cast

import torch
from torch import Tensor, nn

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.collect_moments import collect_moments
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import DataError, SettingError, StorageError
from fedup.federation import Federation
from fedup.files import explained
from fedup.filters.presets import PresetName, preset
from fedup.models.cut import find_cut
from fedup.models.views import fingerprint
from fedup.privacy import paper
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget, union
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.store import Cell, Centroids


def collect(
    model: nn.Module,
    federation: Federation | Contact,
    *,
    statistics: CentroidConfig | MomentConfig | PresetName | Literal["moments"] = "default",
    privacy: DP | Literal["paper"] | None = None,
    cut: str | None = None,
    forget: Iterable[Forget] = (),
    ledger: Ledger | None = None,
) -> Centroids:
    """Ask every client, once, for the centroids of its cells; or, with `statistics="moments"`, for integer sums.

    Without `forget` this is the cache: requests are answered from it later. With `forget` it is the paper's protocol:
    clients leave out what those requests name before they answer. How centroids are made is said by `statistics`, or by
    the name of a preset: ρ = 0.8 and no noise by default, by kind of request with `paper`. Cells of forgotten classes
    are left out, unless a preset relabels them (with settings of your own: `collect_cells(…, with_forgotten=True)`).

    `privacy` is a `DP` guarantee, under which clients send noisy statistics and each release is charged to the `ledger`
    (one without limits where none is given); or "paper": its noise, σ = 0.001 where none is given, and its
    ε counted for each cell, which is noise only and not a DP guarantee.

    Where the way to reach clients has a `vectors_folder`, the vectors lie on its disk in place of memory, for
    federations of many clients: in a file without a name, which goes with the store. `save_centroids` keeps them; what
    `load_centroids` gives lies on disk anyway.
    """
    requests = frozenset(forget)
    if ledger is not None and not isinstance(federation, Federation):
        raise SettingError("A way to reach clients has a ledger of its own: pass ledger= where that is made.")
    if isinstance(federation, Federation):
        federation = InProcess(federation, model, one_reader=True, ledger=ledger)
    if statistics == "moments" or isinstance(statistics, MomentConfig):
        if privacy is not None:
            raise SettingError("Moments are exact and under no guarantee yet: with privacy= collect centroids.")
        config = statistics if isinstance(statistics, MomentConfig) else None
        return collect_moments(model, federation, config, find_cut(model, cut), requests)
    usual = preset("default" if isinstance(statistics, CentroidConfig) else statistics, requests)
    chosen = statistics if isinstance(statistics, CentroidConfig) else CentroidConfig(usual.ratio, usual.sigma)
    how = _how(privacy, chosen, given=chosen is statistics)
    return collect_cells(model, federation, how, cut, requests, with_forgotten=usual.config.class_policy != "drop")


def _how(privacy: object, statistics: CentroidConfig, *, given: bool) -> CentroidConfig | DP:
    if isinstance(privacy, DP):
        if given:
            raise SettingError("Under DP there are no centroids of a ratio and no noise of a sigma: pass neither.")
        return privacy
    if privacy is None:
        return statistics
    if privacy != "paper":
        raise SettingError(f'privacy is a DP(epsilon, delta, clip), "paper" or None; found {privacy!r}.')
    return replace(statistics, sigma=statistics.sigma or paper.SIGMA, paper_accounting=True)


def collect_cells(
    model: nn.Module,
    contact: Contact,
    how: CentroidConfig | DP | MomentConfig,
    cut: str | None,
    requests: frozenset[Forget],
    *,
    with_forgotten: bool,
) -> Centroids:
    """The clients' answers without what the requests name; `with_forgotten` with cells of forgotten classes, which the
    class policies `remap` and `remap_client` need."""
    folder, place = contact.vectors_folder, find_cut(model, cut)
    if folder is not None and not folder.is_dir():  # before anybody is asked, and charged
        raise StorageError(f"There is no folder {folder} to write to. Make it first.")
    with torch.inference_mode(False):  # what is stored must stay writable
        if isinstance(how, MomentConfig):
            return collect_moments(model, contact, how, place, requests)
        return _collect(model, contact, how, place, requests, with_forgotten=with_forgotten)


def _collect(
    model: nn.Module,
    contact: Contact,
    how: CentroidConfig | DP,
    place: str,
    requests: frozenset[Forget],
    *,
    with_forgotten: bool,
) -> Centroids:
    gone = union(requests)
    for request in (*requests, *([gone] if requests else [])):
        contact.check(request)
    before = contact.traffic
    without = frozenset() if with_forgotten else gone.class_ids
    question: CentroidsQuestion | PrivateCentroidsQuestion
    if isinstance(how, DP):
        question, labels = PrivateCentroidsQuestion(place, how, without=without), {}
    else:
        if contact.ledger.budgets:  # before anybody tells of which class a sample is
            contact.ledger.check_exact([client for client in contact.clients if client not in gone.client_ids])
        question, labels = CentroidsQuestion(place, how, without=without), _labels_of(contact, gone)
    instead = {client: _leaving_out(question, ids, labels.get(client, {})) for client, ids in gone.sample_ids.items()}
    building = _Building(how, contact.vectors_folder)
    for _, summary in contact.ask_everyone(question, instead=instead, but=gone.client_ids):
        building.add(summary)
    store = building.finish(
        clients={*building.clients, *gone.client_ids},  # and nobody who gave no answer
        num_classes=contact.num_classes,
        cut=place,
        base=fingerprint(model),
        collected_for=requests,
        sample_labels=labels,
        ledger=contact.ledger,
    )
    store.traffic = contact.traffic - before
    store.bytes_up = dict(store.traffic.by_client)
    return store


def _labels_of(contact: Contact, gone: Forget) -> dict[int, dict[int, int]]:
    """By client the classes of the samples to leave out; raises where one is unknown."""
    return dict(contact.ask({client: LabelsQuestion(ids) for client, ids in gone.sample_ids.items()}))


def _leaving_out(
    question: CentroidsQuestion | PrivateCentroidsQuestion, samples: frozenset[int], labels: Mapping[int, int]
) -> CentroidsQuestion | PrivateCentroidsQuestion:
    if isinstance(question, PrivateCentroidsQuestion):  # nobody is asked of which classes they are
        return replace(question, excluded=samples)
    return replace(question, excluded=samples, sample_labels=labels)


class _Building:
    """A store that grows with each client's answer; one answer at a time is in memory."""

    def __init__(self, how: CentroidConfig | DP, folder: Path | None) -> None:
        self.clients: list[int] = []
        self._how, self._vectors, self._counts = how, _Growing(folder), list[Tensor]()
        self._cells: list[Cell] = []
        self._excluded: dict[tuple[int, int], frozenset[int]] = {}
        self._epsilons: dict[tuple[int, int], float] = {}
        self._first: Summary | None = None

    def add(self, summary: Summary) -> None:
        """Put a client's answer behind the others'. A cell has room for what is left out of it now."""
        self.clients.append(summary.client)
        if not summary.labels:
            return
        self._first = self._first or summary
        room = [self._room(summary, label) for label in summary.labels]
        vectors, counts = summary.vectors, summary.counts
        if list(summary.sizes) != room:
            vectors, counts = vectors.new_zeros(sum(room), vectors.shape[1]), counts.new_zeros(sum(room))
        start = self._cells[-1].slot.stop if self._cells else 0
        taken, placed = 0, 0
        for label, size, space, excluded in zip(summary.labels, summary.sizes, room, summary.excluded, strict=True):
            cell = Cell(summary.client, label, start + placed, space)
            self._cells.append(cell)
            if vectors is not summary.vectors:
                vectors[placed : placed + size] = summary.vectors[taken : taken + size]
                counts[placed : placed + size] = summary.counts[taken : taken + size]
            if excluded:
                self._excluded[cell.name] = excluded
            taken, placed = taken + size, placed + space
        self._vectors.add(vectors)
        self._counts.append(counts.clone())
        cells = [(summary.client, label) for label in summary.labels]
        self._epsilons |= dict(zip(cells, summary.paper_epsilons, strict=False))

    def _room(self, summary: Summary, label: int) -> int:
        return 1 if isinstance(self._how, DP) else centroid_count(summary.rows[label], self._how.ratio)

    def finish(self, *, clients: Iterable[int], **about: Any) -> Centroids:
        """The store of all that was added."""
        if self._first is None:
            raise DataError("No client has anything to summarize.")
        return Centroids(
            vectors=self._vectors.finish(),
            counts=torch.cat(self._counts),
            cells=tuple(self._cells),
            clients=tuple(sorted(clients)),
            how=self._how,
            nonnegative=self._first.nonnegative,
            shape=self._first.shape,
            excluded=self._excluded,
            paper_epsilons=self._epsilons,
            **about,
        )


class _Growing:
    """Rows of vectors, one block after another: in memory, or in a file without a name in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._blocks = folder, list[Tensor]()
        self._file: BinaryIO | None = None
        self._rows = 0

    def add(self, block: Tensor) -> None:
        """Behind the others."""
        self._rows += len(block)
        if self._folder is None:
            self._blocks.append(block)
            return
        with explained(f"write to {self._folder}"):
            if self._file is None:
                self._file = cast(BinaryIO, NamedTemporaryFile(dir=self._folder))  # noqa: SIM115 (closed by finish)
            self._blocks = [block[:0].cpu()]
            self._file.write(block.detach().cpu().contiguous().numpy().data)

    def _joined(self) -> Tensor:
        """In one array; blocks go as they are copied, so that memory is not taken twice."""
        whole, done = self._blocks[0].new_empty(self._rows, self._blocks[0].shape[1]), 0
        self._blocks.reverse()
        while self._blocks:
            block = self._blocks.pop()
            whole[done : done + len(block)] = block
            done += len(block)
        return whole

    def finish(self) -> Tensor:
        """All of them. (M, D)"""
        if self._file is None:
            return self._joined()
        like = self._blocks[0]
        with self._file as file, explained(f"write to {self._folder}"):  # it is gone once it is mapped
            file.flush()
            mapped = torch.from_file(file.name, shared=True, size=self._rows * like.shape[1], dtype=like.dtype)
        return mapped.view(self._rows, like.shape[1])
