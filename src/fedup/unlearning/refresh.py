"""Cells brought up to date with the requests, by their clients where needed; undone on an error."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import ContactError
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.store import Cell, Centroids, insert
from fedup.unlearning.bottleneck_fit import CellsInUse
from fedup.unlearning.report import Report

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class Refresh:
    """Brings the cells in use up to date with the requests; undoes all changes on an error."""

    centroids: Centroids
    contact: Contact | None
    report: Report
    keep_sealed: bool = field(kw_only=True)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undo all changes if the block fails."""
        with self._undo:
            yield
            self._undo.pop_all()

    def leave_open(self, requests: frozenset[Forget]) -> None:
        """Leave out the samples of these requests without a filter."""
        store, before = self.centroids, self.centroids.open
        self._undo.callback(setattr, store, "open", before)
        store.open = before | requests

    def bring_up_to_date(self, used: CellsInUse, left_out: Forget) -> None:
        """Put back sealed originals that leave nothing out any more; ask clients for the other touched cells."""
        touched = self.touched(used, left_out)
        cells = {client: stale for client, stale, _ in touched if stale}
        excluded = {client: left_out.sample_ids.get(client, frozenset()) for client in cells}
        questions = {client: self._question(client, cells[client], excluded[client]) for client in cells}
        answers = self._reach().ask(questions) if questions else ()  # if one fails, nothing has changed yet
        for _, _, unsealed in touched:
            for cell in unsealed:
                self._unseal(cell)
        for client, summary in answers:
            self._replace(cells[client], excluded[client], summary)
            self.report.note_contact(client)

    def touched(
        self, used: CellsInUse, left_out: Forget, *, ask: bool = True
    ) -> list[tuple[int, list[Cell], list[Cell]]]:
        """By client: the cells to ask it for, and those whose sealed original will do. Clients are asked for unknown
        classes of samples; without `ask` nobody is, and such samples touch no cell.

        A cell in use is touched if it was purged or leaves out the wrong samples; another cell, if it holds samples to
        leave out.
        """
        if ask:
            self._ask_for_labels(left_out.sample_ids)
        store = self.centroids
        others = {client for client, _ in (*used.names(store.purged), *store.excluded)} - left_out.sample_ids.keys()
        return [
            (client, *self._touched_of(client, used.of(client), left_out.sample_ids.get(client, frozenset())))
            for client in (*left_out.sample_ids, *sorted(others))
        ]

    def _touched_of(self, client: int, used: list[Cell], wanted: frozenset[int]) -> tuple[list[Cell], list[Cell]]:
        store = self.centroids
        if store.dp:
            return self._touched_under_dp(client, used, wanted)
        labels = store.sample_labels.get(client, {})
        classes = {labels[i] for i in wanted if i in labels}
        should = {(client, label): frozenset(i for i in wanted if labels.get(i) == label) for label in classes}
        touched = [
            cell
            for cell in used
            if cell.name in store.purged or self._left_out(cell) != should.get(cell.name, frozenset())
        ]
        for name, ids in should.items():
            cell = store.cell(name)
            if cell is not None and cell not in used and name not in store.purged and ids - self._left_out(cell):
                touched.append(cell)
        unsealed = [cell for cell in touched if not should.get(cell.name) and cell.name in store.sealed]
        return [cell for cell in touched if cell not in unsealed], unsealed

    def _touched_under_dp(self, client: int, used: list[Cell], wanted: frozenset[int]) -> tuple[list[Cell], list[Cell]]:
        """All cells of the client or none: asking for some would tell of which classes the samples are. What was
        purged and is not in use stays away; which cells these are is known from requests."""
        store = self.centroids
        own = store.cells_of(client)
        live = [cell for cell in own if cell.name not in store.purged or cell in used]
        if all(self._left_out(cell) == wanted and cell.name not in store.purged for cell in live):
            return [], []
        if not wanted and all(cell.name in store.sealed for cell in live):
            return [], live
        return live, []

    def _left_out(self, cell: Cell) -> frozenset[int]:
        return self.centroids.excluded.get(cell.name, frozenset())

    def _ask_for_labels(self, samples: Mapping[int, frozenset[int]]) -> None:
        """Ask for the classes of samples, once; never under DP."""
        labels = self.centroids.sample_labels
        unknown = {client: ids - labels.get(client, {}).keys() for client, ids in samples.items()}
        questions = {client: LabelsQuestion(ids) for client, ids in unknown.items() if ids}
        if not questions or self.centroids.dp:
            return
        for client, reported in self._reach().ask(questions):
            self._keep(labels, client)
            labels[client] = {**labels.get(client, {}), **reported}
            self.report.note_contact(client)

    def _unseal(self, cell: Cell) -> None:
        """Put the sealed original back."""
        store = self.centroids
        self._remember(cell)
        store.put(cell, *store.sealed.pop(cell.name))
        store.excluded.pop(cell.name, None)

    def _question(
        self, client: int, cells: list[Cell], excluded: frozenset[int]
    ) -> CentroidsQuestion | PrivateCentroidsQuestion:
        store, labels = self.centroids, frozenset(cell.label for cell in cells)
        if isinstance(store.how, DP):
            return PrivateCentroidsQuestion(store.cut, store.how, labels, excluded=excluded)
        known = store.sample_labels.get(client, {})
        assert isinstance(store.how, CentroidConfig)  # moments have a refresh of their own
        return CentroidsQuestion(store.cut, store.how, labels, excluded=excluded, sample_labels=known)

    def _replace(self, cells: list[Cell], excluded: frozenset[int], summary: Summary) -> None:
        store = self.centroids
        for cell in cells:
            self._remember(cell)
            untouched = cell.name not in store.excluded and cell.name not in store.purged
            if self.keep_sealed and untouched:
                store.sealed[cell.name] = store.take(cell)
            elif not self.keep_sealed and self._leaves_out(cell, excluded) - self._left_out(cell):
                store.sealed.pop(cell.name, None)  # it holds samples that are left out now
        insert(store, summary)

    def _leaves_out(self, cell: Cell, excluded: frozenset[int]) -> frozenset[int]:
        """The samples among these that may be in the cell."""
        if self.centroids.dp:
            return excluded
        labels = self.centroids.sample_labels.get(cell.client, {})
        return frozenset(i for i in excluded if labels[i] == cell.label)

    def _remember(self, cell: Cell) -> None:
        self.report.cells_replaced += 1
        store, name = self.centroids, cell.name
        self._remember_content(cell)
        self._undo.callback(store.purged.add if name in store.purged else store.purged.discard, name)
        self._keep(store.excluded, name)
        self._keep(store.sealed, name)

    def _remember_content(self, cell: Cell) -> None:
        self._undo.callback(self.centroids.put, cell, *self.centroids.take(cell))

    def _keep(self, content: MutableMapping[K, V], name: K) -> None:
        """Remember an entry, to put it back on an error."""
        if name in content:
            self._undo.callback(content.__setitem__, name, content[name])
        else:
            self._undo.callback(content.pop, name, None)

    def _reach(self) -> Contact:
        if self.contact is None:
            raise ContactError(
                "This needs an answer from clients (samples to leave out, cells that were replaced or purged, or "
                "moments of a class that they did not send), and "
                "there is no way to reach them: pass clients=federation; on the command line, have the data set here."
            )
        return self.contact
