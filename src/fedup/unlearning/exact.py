"""Exact mode: a head on a public backbone, learned in one round, from which rows are taken by subtraction."""

from collections.abc import Collection, Mapping

import torch

from fedup.clients.labels import LabelsQuestion
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.protocol import Contact
from fedup.errors import ContactError, DataError, FingerprintError, RequestError
from fedup.federation import Federation
from fedup.filters.ridge_head import HeadRule, solve_head
from fedup.models.backbone import HEAD, Backbone
from fedup.request import Forget, check_known, union
from fedup.serving.plugged import REQUEST_LOCK
from fedup.statistics.client_parts import ClientPart
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.moment_growth import add_client, add_rows, insert_cells
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName
from fedup.statistics.traffic import Traffic
from fedup.unlearning.bottleneck_fit import CellsInUse
from fedup.unlearning.claim import Claim, alterations, claim_of
from fedup.unlearning.exact_model import ExactModel, check_added, check_classes_left, rows_of_all_parts
from fedup.unlearning.moment_refresh import MomentRefresh
from fedup.unlearning.report import Report

_USUAL_RULE = HeadRule()


class HeadModel(ExactModel):
    """A frozen backbone and a head in closed form. The head is a function of the rows that requests leave.

    `store` has the clients' integer sums, `requests` what is left out, `claim` what may be said of it. Give the same
    `cache` of features to calls with a `Federation`, or none: then the model keeps one in memory.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: MomentStore,
        *,
        rule: HeadRule = _USUAL_RULE,
        requests: frozenset[Forget] = frozenset(),
        cache: FeatureCache | None = None,
    ) -> None:
        super().__init__(backbone, store.num_classes, store.config, rule, cache)
        if store.base != self.base_fingerprint:
            raise FingerprintError(
                f"The statistics were made with backbone {store.base[:12]}, and this is {self.base_fingerprint[:12]}: "
                "another one, another version of it, or another label set. Take the one they were made with, or learn "
                "again."
            )
        if store.config.step != backbone.step or store.config.bound != backbone.bound:
            raise DataError(
                f"The statistics have steps of {store.config.step:g} up to {store.config.bound:g}, and the backbone "
                f"{backbone.step:g} up to {backbone.bound:g}: sums of two scales do not add up. Learn again."
            )
        self.store, self.requests = store, requests
        self.totals = store.retained(union(requests))
        self.head.put(solve_head(self.totals, store.config, rule))

    @property
    def claim(self) -> Claim:
        """What may be claimed of the model as it is now."""
        totals, store = self.store.retained(union(self.requests)), self.store
        learned = solve_head(totals, store.config, self.rule) if totals == self.totals else None
        altered = alterations(self.blank, store.base, self.head, learned)
        return claim_of(self.backbone, store, self.requests, self.configuration, altered)

    # --- requests

    def unlearn(
        self,
        request: Forget | Collection[Forget],
        *,
        clients: Federation | Contact | None = None,
        keep_sealed: bool = False,
        force: bool = False,
    ) -> Report:
        """Take rows out: the head is the one that would have been learned without them.

        Clients and classes need the store alone, unless sums of a single class were not sent; samples ask their
        clients. A request that would take the last rows of a class that nobody asked to forget is refused
        (`HarmError`), unless `force` is given. An error changes nothing.
        """
        new = frozenset(self.resolved(each, clients) for each in _several(request))
        with REQUEST_LOCK:
            for each in new:
                check_known(each, clients=self.store.known_clients, num_classes=self.store.num_classes)
                if each in self.requests:
                    raise RequestError(f"The request to {each} is active already; nothing was changed.")
            return self._serve(self.requests | new, clients, keep_sealed=keep_sealed, force=force)

    def restore(self, request: Forget | Collection[Forget], *, clients: Federation | Contact | None = None) -> Report:
        """Take requests back: their rows are added again. What was purged, and samples, are asked from clients."""
        answered = {own.as_named: own for own in self.requests}
        withdrawn = frozenset(own if own.is_resolved else answered.get(own, own) for own in _several(request))
        with REQUEST_LOCK:
            if unknown := withdrawn - self.requests:
                listed = ", ".join(map(str, unknown))
                raise RequestError(f"The request to {listed} is not active, so it cannot be taken back.")
            return self._serve(self.requests - withdrawn, clients, keep_sealed=False, force=True)

    def finish_pending(self, *, clients: Federation | Contact) -> Report:
        """Ask the clients again whose sums are left out since they had not answered."""
        with REQUEST_LOCK:
            if not self.store.pending:
                return Report(self.requests)
            return self._serve(self.requests, clients, keep_sealed=False, force=True)

    def purge(self, *, clients: Federation | None = None) -> list[CellName]:
        """Delete what the server keeps of forgotten rows, and with a federation also their cached features."""
        with REQUEST_LOCK:
            if not self.requests:
                raise RequestError("No request is active, so nothing is sealed and nothing to purge.")
            forget_set, store = union(self.requests), self.store
            cells = store.cells_named(forget_set)
            sealed = sorted({cell.name for cell in cells if cell.name not in store.purged} | set(store.sealed))
            store.purge(forget_set, cells)
            if clients is not None:
                self.cache.drop(rows_of_all_parts(clients, forget_set))
            return sealed

    def _serve(
        self, requests: frozenset[Forget], clients: Federation | Contact | None, *, keep_sealed: bool, force: bool
    ) -> Report:
        report, store, forget_set = Report(requests), self.store, union(requests)
        contact = self.contact(clients)
        before = contact.traffic if contact else Traffic()
        new = union(requests - self.requests)
        refresh = MomentRefresh(store, contact, report, keep_sealed=keep_sealed, new=new)
        used = CellsInUse(store, Forget(forget_set.client_ids, forget_set.class_ids))
        try:
            with torch.inference_mode(False), refresh.undone_on_error():
                with report.stage("contact"):
                    refresh.wait_for_nobody()
                    refresh.bring_up_to_date(used, forget_set)
                with report.stage("fit"):
                    totals = store.retained(forget_set)
                    check_classes_left(self.totals, totals, forget_set, report, force=force)
                    scores = solve_head(totals, store.config, self.rule)
                with report.stage("swap"):
                    self.head.put(scores)
        finally:
            report.traffic = (contact.traffic if contact else Traffic()) - before
        self.cache.save()  # before anybody stores the sums that were made from it
        self.totals, self.requests, report.centroids_used = totals, requests, store.rows_besides(forget_set)
        for client, sent in report.traffic.by_client.items():
            store.bytes_up[client] = store.bytes_up.get(client, 0) + sent
        return report

    # --- what comes later

    def add_clients(self, clients: Federation | Contact, ids: Collection[int]) -> Report:
        """Let clients join: their sums are added, and the head is as if they had been there from the start."""
        contact = self._reach(clients)
        before = contact.traffic
        with REQUEST_LOCK:
            question = MomentsQuestion(HEAD, self.store.config)
            grown, report = self.store.to("cpu"), Report(self.requests)
            if set(ids) <= set(contact.clients):
                answers = dict(contact.ask(dict.fromkeys(ids, question)))
            else:  # nodes that nobody has met yet
                answers = dict(contact.ask_everyone(question, but=self.store.known_clients))
            if missing := sorted(set(ids) - answers.keys()):
                raise RequestError(f"Unknown client {missing}: no such client can be reached. Nothing was changed.")
            for client, answer in sorted(answers.items()):
                if client not in ids:
                    continue
                add_client(grown, client, answer.moments, answer.by_class)
                grown.shortened += answer.shortened
                grown.unreported = {**grown.unreported, client: answer.unreported}
                report.note_contact(client)
            return self._take(grown, contact, report, before)

    def add_samples(self, clients: Federation | Contact, samples: Mapping[int, Collection[int]]) -> Report:
        """Add rows that known clients have got since: the opposite of a request to forget them."""
        contact, added = self._reach(clients), {client: frozenset(ids) for client, ids in samples.items()}
        before = contact.traffic
        if named := [c for request in self.requests for c in request.sample_ids if c in added]:
            both = {c: union(self.requests).sample_ids[c] & added[c] for c in named}
            if any(both.values()):
                raise RequestError(f"Samples {both} are forgotten by requests in force: restore them instead.")
        with REQUEST_LOCK:
            check_known(Forget.samples(added), clients=self.store.known_clients, num_classes=self.store.num_classes)
            grown, report = self.store.to("cpu"), Report(self.requests)
            labels = dict(contact.ask({client: LabelsQuestion(ids) for client, ids in added.items()}))
            insert_cells(grown, [(client, label) for client, of in labels.items() for label in of.values()])
            self._mark_absent(grown, labels)
            for client, of in labels.items():
                for cell in grown.cells_of(client):
                    grown.sizes[cell.start] += sum(label == cell.label for label in of.values())
            questions = {client: self._question(grown, client, of) for client, of in labels.items()}
            for client, (leaving, returning) in contact.ask({c: q for c, q in questions.items() if q.labels}):
                if leaving.moments.rows or returning.moments.rows != _count(labels[client], questions[client].labels):
                    raise ContactError(f"Client {client} answers for other rows than were to be added.")
                add_rows(grown, client, returning.moments, returning.by_class)
                grown.shortened += returning.shortened
                report.note_contact(client)
            return self._take(grown, contact, report, before)

    def _mark_absent(self, grown: MomentStore, labels: Mapping[int, Mapping[int, int]]) -> None:
        """New cells of what was forgotten and purged are absent, too: restoring asks for them."""
        for client, of in labels.items():
            own = [cell for cell in grown.cells_of(client) if cell.label in of.values()]
            purged = client not in grown.parts and any(name[0] == client for name in grown.purged)
            for cell in own:
                if purged and not int(grown.counts[cell.start]):
                    grown.purged.add(cell.name)
            if client not in grown.parts and not purged:
                sums = torch.zeros(len(grown.cells_of(client)), grown.total.width, dtype=torch.int64)
                grown.parts[client] = ClientPart(sums, torch.zeros_like(grown.total.second))

    @staticmethod
    def _question(grown: MomentStore, client: int, labels: Mapping[int, int]) -> MomentChangeQuestion:
        here = {i: label for i, label in labels.items() if (client, label) not in grown.purged}
        before = frozenset().union(*(grown.excluded.get((client, label), frozenset()) for label in set(here.values())))
        asked = frozenset(here.values())
        return MomentChangeQuestion(HEAD, grown.config, asked, before | here.keys(), before)

    def _take(self, grown: MomentStore, contact: Contact, report: Report, before: Traffic) -> Report:
        """Serve a store that has grown; the one so far stays where that fails."""
        together, known = (grown.shortened, grown.total.rows), self.store
        added = together[0] - known.shortened, together[1] - known.total.rows
        check_added(*added, together, grown.config, report)
        kept, self.store = self.store, grown
        try:
            served = self._serve(self.requests, contact, keep_sealed=False, force=True)
        except BaseException:
            self.store = kept
            raise
        served.clients_contacted = sorted({*report.clients_contacted, *served.clients_contacted})
        served.notes += report.notes
        served.traffic = contact.traffic - before
        return served


def _count(labels: Mapping[int, int], asked: frozenset[int]) -> int:
    return sum(label in asked for label in labels.values())


def _several(request: Forget | Collection[Forget]) -> frozenset[Forget]:
    several = frozenset([request] if isinstance(request, Forget) else request)
    if not several or not all(isinstance(each, Forget) for each in several):
        raise RequestError(f"A request is made by Forget.clients, .classes or .samples; found {request!r}.")
    return several
