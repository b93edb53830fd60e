"""Phase 2 in one call: every client is asked, once, for what the server keeps of it."""

from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Literal, cast

import torch
from torch import Tensor, nn

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.collect_moments import collect_moments, suits_moments
from fedup.clients.in_process import InProcess
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import CutError, DataError, SettingError, StorageError, check_choice
from fedup.federation import Federation
from fedup.files import explained
from fedup.filters.presets import PresetName, preset
from fedup.models.cut import find_cut
from fedup.models.outputs import check_outputs
from fedup.models.remembered import RememberingReader
from fedup.models.views import fingerprint
from fedup.privacy import paper
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget, union
from fedup.statistics.cell_table import CellTable
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.store import Centroids


def collect(
    model: nn.Module,
    federation: Federation | Contact,
    *,
    statistics: CentroidConfig | MomentConfig | PresetName | Literal["auto", "centroids", "moments"] = "auto",
    privacy: DP | Literal["paper"] | None = None,
    cut: str | None = None,
    forget: Iterable[Forget] = (),
    ledger: Ledger | None = None,
) -> Centroids:
    """Ask every client, once, for its moments, which are integer sums; or for the centroids of its cells.

    By default clients send moments if the cut is before a last linear layer and there is no `privacy`, else centroids
    (ρ = 0.8, no noise). `statistics` chooses: "moments", "centroids", settings of either, or the name of a preset
    (`paper` has centroids by kind of request).

    Without `forget` the result is a cache: later requests are answered from it. With `forget` this is the paper's
    protocol: clients leave out what those requests name before they answer. Cells of forgotten classes are left out,
    unless a preset relabels them (or `collect_cells(…, with_forgotten=True)`).

    `privacy` is a `DP` guarantee: clients send noisy statistics, and each release is charged to the `ledger` (without
    limits by default). Or it is "paper": the paper's noise (σ = 0.001 by default) and its ε for each cell, which is
    noise only and not a DP guarantee.

    If the contact has a `vectors_folder`, vectors are kept in an unnamed file there instead of in memory. The file is
    deleted with the store; `save_centroids` writes a copy. Moments of many clients are always kept so: there, or where
    the system has its temporary files.
    """
    requests = frozenset(forget)
    if not isinstance(model, nn.Module) or not (isinstance(federation, Federation) or hasattr(federation, "ask")):
        found = f"{type(model).__name__} and {type(federation).__name__}"
        raise SettingError(f"collect() takes a model and a federation, or a contact; found {found}.")
    if ledger is not None and not isinstance(federation, Federation):
        raise SettingError("A contact has a ledger of its own: pass ledger= where the contact is made.")
    tries_moments = statistics == "moments" or isinstance(statistics, MomentConfig)
    if statistics == "auto" and privacy is None:
        tries_moments = federation.targets != "classes" or suits_moments(model, federation, cut)
    if isinstance(federation, Federation):
        if privacy is None:  # else the model sees no row before the charge
            check_outputs(model, federation.x, federation.y, federation.num_classes)
        make_reader = RememberingReader if tries_moments else None  # a better grid reads all rows again
        federation = InProcess(federation, model, one_reader=True, make_reader=make_reader, ledger=ledger)
    if statistics == "auto":
        fits = federation.targets != "classes"  # no others do
        if tries_moments and not fits:
            with suppress(CutError):  # several vectors of a row enter the last layer, which only its rows show
                return collect_cells(model, federation, MomentConfig(), cut, requests, with_forgotten=False)
        statistics = "moments" if tries_moments and fits else "centroids"
    if statistics == "moments" or isinstance(statistics, MomentConfig):
        if privacy is not None:
            raise SettingError("Moments are exact and under no guarantee yet: with privacy= collect centroids.")
        config = statistics if isinstance(statistics, MomentConfig) else MomentConfig()
        return collect_cells(model, federation, config, cut, requests, with_forgotten=False)
    usual = preset(_preset_of(statistics), requests)
    chosen = statistics if isinstance(statistics, CentroidConfig) else CentroidConfig(usual.ratio, usual.sigma)
    how = _protected(privacy, chosen, given=chosen is statistics)
    return collect_cells(model, federation, how, cut, requests, with_forgotten=usual.config.class_policy != "drop")


def _protected(privacy: object, statistics: CentroidConfig, *, given: bool) -> CentroidConfig | DP:
    if isinstance(privacy, DP):
        if given:
            raise SettingError("Under DP clients send no centroids: pass no `statistics` (ratio, sigma).")
        return privacy
    if privacy is None:
        return statistics
    if privacy != "paper":
        raise SettingError(f'privacy is a DP(epsilon, delta, clip), "paper" or None; found {privacy!r}.')
    return replace(statistics, sigma=statistics.sigma or paper.SIGMA, paper_accounting=True)


def _preset_of(statistics: object) -> PresetName:
    if isinstance(statistics, CentroidConfig) or statistics == "centroids":
        return "default"
    check_choice("statistics", statistics, Literal["auto", "moments", "centroids", "default", "paper", "authors"])
    return cast(PresetName, statistics)


@torch.inference_mode(False)  # what is stored must stay writable
def collect_cells(
    model: nn.Module,
    contact: Contact,
    how: CentroidConfig | DP | MomentConfig,
    cut: str | None,
    requests: frozenset[Forget],
    *,
    with_forgotten: bool,
) -> Centroids:
    """The clients' answers without what the requests name. With `with_forgotten` cells of forgotten classes are kept:
    the class policies `remap` and `remap_client` need them."""
    folder, place = contact.vectors_folder, find_cut(model, cut)
    if folder is not None and not folder.is_dir():  # before anybody is asked, and charged
        raise StorageError(f"There is no folder {folder} to write to. Make it first.")
    if isinstance(how, MomentConfig):
        return collect_moments(model, contact, how, place, requests)
    if contact.targets != "classes":
        kind = "Statistics under differential privacy" if isinstance(how, DP) else "Centroids"
        raise SettingError(
            f"{kind} are of classes, and this federation has {contact.targets}: collect moments (statistics='moments')."
        )
    forget_set = union(requests)
    for request in (*requests, *([forget_set] if requests else [])):
        contact.check(request)
    before = contact.traffic
    without = frozenset() if with_forgotten else forget_set.class_ids
    labels: dict[int, dict[int, int]] = {}
    question: CentroidsQuestion | PrivateCentroidsQuestion
    instead: dict[int, CentroidsQuestion | PrivateCentroidsQuestion]
    if isinstance(how, DP):
        question = PrivateCentroidsQuestion(place, how, without=without)
        instead = {client: replace(question, excluded=ids) for client, ids in forget_set.sample_ids.items()}
    else:
        if contact.ledger.budgets:  # before a client says which class a sample has
            contact.ledger.check_exact([client for client in contact.clients if client not in forget_set.client_ids])
        question = CentroidsQuestion(place, how, without=without)
        labels = dict(contact.ask({client: LabelsQuestion(ids) for client, ids in forget_set.sample_ids.items()}))
        instead = {
            client: replace(question, excluded=ids, sample_labels=labels[client])
            for client, ids in forget_set.sample_ids.items()
        }
    builder = _StoreBuilder(how, folder)
    for _, summary in contact.ask_everyone(question, instead=instead, but=forget_set.client_ids):
        builder.add(summary)
    store = builder.finish(
        clients={*builder.clients, *forget_set.client_ids},  # a client that gave no answer is not part of the store
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


class _StoreBuilder:
    """A store that grows with each client's answer; one answer at a time is in memory."""

    def __init__(self, how: CentroidConfig | DP, folder: Path | None) -> None:
        self.clients: list[int] = []
        self._how, self._vectors, self._counts = how, _GrowingTable(folder), array("q")
        self._cells = array("Q"), array("q"), array("q")  # clients, classes, rows
        self._excluded: dict[tuple[int, int], frozenset[int]] = {}
        self._epsilons: dict[tuple[int, int], float] = {}
        self._first: Summary | None = None

    def add(self, summary: Summary) -> None:
        """Append a client's answer. A cell keeps room for the rows that are left out of it now."""
        self.clients.append(summary.client)
        if not summary.labels:
            return
        self._first = self._first or summary
        ratio = None if isinstance(self._how, DP) else self._how.ratio
        room = [1 if ratio is None else centroid_count(summary.rows[label], ratio) for label in summary.labels]
        vectors, counts = summary.vectors, summary.counts
        if list(summary.sizes) != room:
            vectors, counts = vectors.new_zeros(sum(room), vectors.shape[1]), counts.new_zeros(sum(room))
        taken, placed = 0, 0
        for label, size, space, excluded in zip(summary.labels, summary.sizes, room, summary.excluded, strict=True):
            for column, value in zip(self._cells, (summary.client, label, space), strict=True):
                column.append(value)
            if vectors is not summary.vectors:
                vectors[placed : placed + size] = summary.vectors[taken : taken + size]
                counts[placed : placed + size] = summary.counts[taken : taken + size]
            if excluded:
                self._excluded[summary.client, label] = excluded
            taken, placed = taken + size, placed + space
        self._vectors.add(vectors)
        self._counts.extend(counts.tolist())
        cells = [(summary.client, label) for label in summary.labels]
        self._epsilons |= dict(zip(cells, summary.paper_epsilons, strict=False))

    def finish(self, *, clients: Iterable[int], **about: Any) -> Centroids:
        """The store of all that was added."""
        if self._first is None:
            raise DataError("No client has anything to summarize.")
        return Centroids(
            vectors=self._vectors.finish(),
            counts=torch.frombuffer(self._counts, dtype=torch.int64).to(self._first.counts),
            cells=CellTable(*self._cells),
            clients=tuple(sorted(clients)),
            how=self._how,
            nonnegative=self._first.nonnegative,
            shape=self._first.shape,
            excluded=self._excluded,
            paper_epsilons=self._epsilons,
            **about,
        )


class _GrowingTable:
    """Rows of vectors, block after block: in memory, or in an unnamed file in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._blocks = folder, list[Tensor]()
        self._file: BinaryIO | None = None
        self._rows = 0

    def add(self, block: Tensor) -> None:
        """Append a block."""
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
        """All blocks in one array; each is freed once it is copied, so that memory is not taken twice."""
        whole, end = self._blocks[0].new_empty(self._rows, self._blocks[0].shape[1]), self._rows
        while self._blocks:
            block = self._blocks.pop()
            whole[end - len(block) : end] = block
            end -= len(block)
        return whole

    def finish(self) -> Tensor:
        """All rows. (M, D)"""
        if self._file is None:
            return self._joined()
        like = self._blocks[0]
        with self._file as file, explained(f"write to {self._folder}"):  # deleted once it is mapped
            file.flush()
            mapped = torch.from_file(file.name, shared=True, size=self._rows * like.shape[1], dtype=like.dtype)
        return mapped.view(self._rows, like.shape[1])
