"""MomentStore brought to the state that requests ask for: rows leave and come back by subtraction and addition."""

from collections.abc import Collection, Sequence

import torch

from fedup.clients.moments import ClientMoments, MomentChangeQuestion, MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import ContactError
from fedup.request import Forget
from fedup.statistics.integer_moments import IntegerMoments
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Cell, Centroids
from fedup.unlearning.bottleneck_fit import CellsInUse
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report


class MomentRefresh(Refresh):
    """A `Refresh` of moments: clients answer with the moments of what changes, or of single cells."""

    centroids: MomentStore

    def touched(
        self, used: CellsInUse, left_out: Forget, *, ask: bool = True
    ) -> list[tuple[int, list[Cell], list[Cell]]]:
        """As `Refresh.touched`, with cells whose second moments are needed by themselves."""
        by_client = {client: (cells, unsealed) for client, cells, unsealed in super().touched(used, left_out, ask=ask)}
        for cell in self.centroids.missing_cells(left_out, frozenset(self._silent)):
            cells, _ = by_client.setdefault(cell.client, ([], []))
            if cell not in cells:
                cells.append(cell)
        return [(client, *parts) for client, parts in by_client.items()]

    def bring_up_to_date(self, used: CellsInUse, left_out: Forget) -> None:
        """Ask for what leaves and comes back and apply it, then ask for single cells; undone on an error."""
        touched = super().touched(used, left_out)
        changing = {client: cells for client, cells, _ in touched if cells}
        samples = {client: left_out.sample_ids.get(client, frozenset()) for client in changing}
        known = [client for client in changing if self._knows_labels(client, samples[client])]
        changed = self._ask({client: self._change_question(client, changing[client], left_out) for client in known})
        for _, _, unsealed in touched:
            for cell in unsealed:
                self._unseal(cell)
        for client, (leaving, returning) in changed.items():
            with self._if_it_fits(client):
                for cell in changing[client]:
                    self._change(cell, samples[client], leaving, returning)
            self.report.note_contact(client)
        self._wait_for_answers(changing, left_out)
        self._ask_for_cells(left_out)
        self._check_somebody_stays(used)

    def _ask_for_cells(self, left_out: Forget) -> None:
        """Ask for second moments of single cells until what is retained can be had without anybody who is absent."""
        store = self.centroids
        while cells := store.missing_cells(left_out, frozenset(self._silent)):
            missing: dict[int, list[Cell]] = {}
            for cell in cells:
                missing.setdefault(cell.client, []).append(cell)
            questions = {client: self._cells_question(client, own, left_out) for client, own in missing.items()}
            for client, answer in self._ask(questions, bound=()).items():
                with self._if_it_fits(client):
                    for cell in missing[client]:
                        self._keep_cell(cell, answer)
                self.report.note_contact(client)
            for client in sorted(missing.keys() & self._silent.keys() - left_out.client_ids):
                self._wait_for(client, store.cells_of(client))

    def _wait_for(self, client: int, cells: Collection[Cell]) -> None:
        """Only all of a client can be subtracted without its help."""
        super()._wait_for(client, self.centroids.cells_of(client) if cells else ())

    def _unfit(self, cells: Sequence[Cell], excluded: frozenset[int]) -> Sequence[Cell]:
        """As `Refresh._unfit`; cells that were purged are in no sum."""
        unfit = super()._unfit(cells, excluded)
        return [cell for cell in unfit if cell.name not in self.centroids.purged]

    def _change_question(self, client: int, cells: list[Cell], left_out: Forget) -> MomentChangeQuestion:
        store = self.centroids
        labels = frozenset(cell.label for cell in cells)
        absent = frozenset(cell.label for cell in cells if cell.name in store.purged)
        before = frozenset().union(*(self._left_out(cell) for cell in cells))
        after = left_out.sample_ids.get(client, frozenset())
        return MomentChangeQuestion(store.cut, store.config, labels, before, after, absent)

    def _cells_question(self, client: int, cells: list[Cell], left_out: Forget) -> MomentsQuestion:
        store, labels = self.centroids, frozenset(cell.label for cell in cells)
        excluded = frozenset().union(*(self._left_out(cell) for cell in cells))  # as the store has them
        return MomentsQuestion(store.cut, store.config, labels, excluded=excluded)

    def _change(self, cell: Cell, wanted: frozenset[int], leaving: ClientMoments, returning: ClientMoments) -> None:
        store, name = self.centroids, cell.name
        self._remember(cell)
        excluded = self._leaves_out(cell, wanted)
        untouched = name not in store.excluded and name not in store.purged
        if self.keep_sealed and untouched:
            store.sealed[name] = store.take(cell)
            store.sealed_second[name] = store.total.second.new_zeros(store.total.second.shape)
        elif not self.keep_sealed and excluded - self._left_out(cell):
            store.sealed.pop(name, None)  # it holds samples that are left out from now on
            store.sealed_second.pop(name, None)
        empty = store.total.second.new_zeros(store.total.second.shape)
        self._check_change(cell, excluded, leaving, returning)
        second = returning.by_class.get(cell.label, empty) - leaving.by_class.get(cell.label, empty)
        store.change(cell, returning.moments - leaving.moments, second)
        if name in store.sealed_second:
            store.sealed_second[name] = store.sealed_second[name] - second
        store.excluded.pop(name, None)
        if excluded:
            store.excluded[name] = excluded
        if name in store.purged and not int(store.sizes[cell.start]):  # it was not asked for when the client was
            self._undo.callback(store.sizes.__setitem__, cell.start, 0)
            store.sizes[cell.start] = int(store.counts[cell.start]) + len(excluded)
        store.purged.discard(name)

    def _check_change(
        self, cell: Cell, excluded: frozenset[int], leaving: ClientMoments, returning: ClientMoments
    ) -> None:
        """Raise unless as many rows leave and come back as the request says; a node's own rules may empty a cell."""
        store, before, now = self.centroids, self._left_out(cell), self.centroids.rows_in(cell)
        left, back = (int(part.moments.counts[cell.label]) for part in (leaving, returning))
        after = now - left + back
        if cell.name in store.purged:
            fits = left == 0
        elif after == 0:
            fits = back == 0 and left == now
        elif now == 0:
            fits = left == 0
        else:
            fits = left == len(excluded - before) and back == len(before - excluded)
        rows = int(store.sizes[cell.start])
        if store.targets == "labels":  # rows with a label of which few would stay or leave go with it
            fits = left == 0 if cell.name in store.purged else 0 <= after <= (rows or after)
        elif rows:
            fits &= after in (0, store.rows_staying(cell, excluded))
        elif cell.name not in store.purged:  # what it has of it was left out, or too few to report, at collection
            fits &= after <= store.unreported.get(cell.client, 0)
        if not fits:
            raise ContactError(
                f"Client {cell.client} reports that {left} rows of class {cell.label} leave and {back} come back, "
                "which is not what was asked for. Nothing was changed here; its data may have changed: collect again."
            )

    def _keep_cell(self, cell: Cell, answer: ClientMoments) -> None:
        store = self.centroids
        rows, reported = int(store.counts[cell.start]), int(answer.moments.counts[cell.label])
        if reported != rows or not torch.equal(answer.moments.sums[cell.label], store.sums_of(cell)):
            raise ContactError(
                f"Client {cell.client} now reports {reported} rows of class {cell.label}, or other sums of them, than "
                f"the {rows} it sent at collection: its data changed. Nothing was changed here; collect again."
            )
        store.check_cell(cell, answer.by_class[cell.label])
        self._keep(store.of_cells, cell.name)
        store.of_cells[cell.name] = answer.by_class[cell.label]

    def _unseal(self, cell: Cell) -> None:
        """Add back what the sealed original has beyond the cell."""
        store = self.centroids
        self._remember(cell)
        sums, counts = store.sealed.pop(cell.name)
        now = IntegerMoments.zeros(*store.total.sums.shape)
        now.counts[cell.label] = counts[0] - store.counts[cell.start]
        now.sums[cell.label] = sums[0] - store.sums_of(cell)
        store.change(cell, now, store.sealed_second.pop(cell.name))
        store.excluded.pop(cell.name, None)

    def _remember_content(self, cell: Cell) -> None:
        """Totals are replaced, never written to: putting the old ones back is enough."""
        store = self.centroids
        self._undo.callback(setattr, store, "total", store.total)
        self._undo.callback(store.counts.__setitem__, cell.start, store.counts[cell.start].clone())
        self._keep(store.parts, cell.client)
        self._keep(store.of_classes, cell.label)
        self._keep(store.of_cells, cell.name)
        self._keep(store.sealed_second, cell.name)


def refresh_of(
    store: Centroids, contact: Contact | None, report: Report, *, keep_sealed: bool, new: Forget | None = None
) -> Refresh:
    """The refresh that fits a store; `new` is what no filter answers yet."""
    kind = MomentRefresh if isinstance(store, MomentStore) else Refresh
    return kind(store, contact, report, keep_sealed=keep_sealed, new=new or Forget())
