"""Cells brought up to date with the requests, by their clients where needed; undone on an error."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.labels import LabelsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.protocol import Contact, ask_those_there
from fedup.clients.question import Question
from fedup.errors import ContactError, DataError
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.statistics.centroids import CentroidConfig, Summary
from fedup.statistics.store import Cell, Centroids, insert
from fedup.unlearning.bottleneck_fit import CellsInUse
from fedup.unlearning.report import Report

A = TypeVar("A")
K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class Refresh:
    """Brings the cells in use up to date with the requests; undoes all changes on an error.

    A client that is absent holds up nobody: its cells that hold forgotten rows, or may hold some, are out of use until
    it answers (`Centroids.pending`). It is asked again with every later answer.
    """

    centroids: Centroids
    contact: Contact | None
    report: Report
    keep_sealed: bool = field(kw_only=True)
    new: Forget = field(default_factory=Forget, kw_only=True)  # what no filter answers yet
    _undo: ExitStack = field(default_factory=ExitStack, init=False)
    _silent: dict[int, str] = field(default_factory=dict, init=False)  # clients without an answer of use, and why

    def __post_init__(self) -> None:
        self._waited_for = frozenset(self.centroids.pending)

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
        known = [client for client in cells if self._knows_labels(client, excluded[client])]
        questions = {client: self._question(client, cells[client], excluded[client]) for client in known}
        answers = self._ask(questions)  # if one fails, nothing has changed yet
        for _, _, unsealed in touched:
            for cell in unsealed:
                self._unseal(cell)
        for client, summary in answers.items():
            with self._if_it_fits(client):
                self._replace(cells[client], excluded[client], summary)
            self.report.note_contact(client)
        self._wait_for_answers(cells, left_out)
        self._check_somebody_stays(used)

    # --- clients that are absent

    def wait_for_nobody(self) -> None:
        """Begin anew: all are asked again."""
        store = self.centroids
        self._undo.callback(setattr, store, "pending", store.pending)
        store.pending = {}

    def _ask(self, questions: Mapping[int, Question[A]], *, bound: Collection[int] | None = None) -> dict[int, A]:
        """The answers of all clients that give one; who gave none is not asked again.

        A client that is there has to answer for new requests, or else if it is `bound` to. Without a way to reach
        clients those that were waited for stay absent.
        """
        questions = {client: question for client, question in questions.items() if client not in self._silent}
        if self.contact is None and questions.keys() <= self._waited_for:
            answers: dict[int, A] = {}
        else:
            bound = self._bound if bound is None else bound
            answers = ask_those_there(self._reach(), questions, bound=bound) if questions else {}
        for client in questions.keys() - answers.keys():
            why = "no way to reach it was given" if self.contact is None else self.contact.silent[client]
            self._silent[client] = why
        return answers

    @property
    def _bound(self) -> Collection[int]:
        return {*self.new.sample_ids, *self.new.client_ids}

    @contextmanager
    def _if_it_fits(self, client: int) -> Iterator[None]:
        """Undo what a client's answer changed if it does not fit what the client sent before: nobody else has to wait
        for a client whose rows have changed. Of a client that has to answer this is an error."""
        outer, self._undo = self._undo, ExitStack()
        try:
            with self._undo:
                yield
                outer.callback(self._undo.pop_all().close)
        except (ContactError, DataError) as error:
            if client in self._bound:
                raise
            self._silent[client] = str(error)
        finally:
            self._undo = outer

    def _wait_for_answers(self, cells: Mapping[int, Sequence[Cell]], left_out: Forget) -> None:
        """Wait for clients that did not answer for these cells, or have not said of which class forgotten samples are,
        or which rows a person has."""
        store = self.centroids
        for client in sorted(cells.keys() & self._silent.keys() - left_out.client_ids):
            self._wait_for(client, self._unfit(cells[client], left_out.sample_ids.get(client, frozenset())))
        unknown = [client for client, ids in left_out.sample_ids.items() if not self._knows_labels(client, ids)]
        for client in sorted({*unknown, *store.unnamed} - left_out.client_ids):
            self._wait_for(client, store.cells_of(client))

    def _wait_for(self, client: int, cells: Collection[Cell]) -> None:
        """Leave cells out of use until their client answers."""
        store, labels = self.centroids, frozenset(cell.label for cell in cells)
        store.pending = {**store.pending, client: store.pending.get(client, frozenset()) | labels}
        classes = ", ".join(map(str, sorted(store.pending[client])))
        out_of_use = f"its statistics of class {classes} are out of use until then"
        part = out_of_use if classes else "some of its rows have yet to leave or to come back"
        self.report.wait_for(client, f"{part} ({self._silent.get(client, 'it has not answered')})")

    def _check_somebody_stays(self, used: CellsInUse) -> None:
        """Raise if all statistics wait for somebody: a filter fitted to nothing would do anything."""
        if self.centroids.pending and not any(cell in used for cell in self.centroids.cells):
            reasons = "; ".join(f"client {client}: {why}" for client, why in sorted(self._silent.items()))
            raise ContactError(
                f"No client is left whose statistics can be used: all others are to be forgotten, or have not answered "
                f"({reasons}). Nothing was changed. Ask again when they are back."
            )

    def _unfit(self, cells: Sequence[Cell], excluded: frozenset[int]) -> Sequence[Cell]:
        """Cells that must not be used as they are: forgotten rows are in them. Rows that would come back can wait."""
        if not self._knows_labels(cells[0].client, excluded):
            return self.centroids.cells_of(cells[0].client)
        purged = self.centroids.purged
        return [c for c in cells if c.name in purged or self._leaves_out(c, excluded) - self._left_out(c)]

    def _knows_labels(self, client: int, samples: frozenset[int]) -> bool:
        """Whether the classes of these samples are known, or need not be."""
        store = self.centroids
        return store.dp is not None or samples <= store.sample_labels.get(client, {}).keys()

    # --- what is touched

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
        for client, reported in self._ask(questions).items():
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
