"""Requests and additions answered in a run folder in exact mode: solved, measured, stored, and only then in force."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedup.clients.protocol import Contact
from fedup.errors import RequestError
from fedup.federation import Federation
from fedup.run.answer import NewRequest, contact_facts, describe_pending
from fedup.run.exact import FEATURES, claim_here, salt_of
from fedup.run.folder import Writer
from fedup.run.head_judge import HeadJudge
from fedup.run.head_trial import Describe, Figures, Trial, Trials
from fedup.run.limits import Limits
from fedup.run.state import FileRecord, Request
from fedup.statistics.store import CellName
from fedup.statistics.store_file import save_centroids
from fedup.unlearning.class_recall import Recall
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.exact_file import write_head
from fedup.unlearning.exact_model import described
from fedup.unlearning.report import Report


@dataclass
class HeadOutcome:
    """The result of a request in exact mode."""

    requests: Sequence[str]
    head: FileRecord
    report: Report
    claim: dict[str, Any] | None
    in_force: Sequence[str]
    declined: str | None = None  # why nothing was changed
    recalls: Mapping[int, Recall] = field(default_factory=dict)
    entries: Sequence[Mapping[str, Any]] = ()  # new requests, as the journal has them


@dataclass(frozen=True, eq=False)
class HeadDesk:
    """A run folder open for writing, with the head and the clients that answer its requests. `facts` go into each event
    unchanged; `describe` checks a request and says which rows it names. After a declined answer, load the model anew.
    """

    writer: Writer
    model: HeadModel | CohortModel
    clients: Federation | Contact | None = None
    judge: HeadJudge | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    describe: Describe = lambda request: request

    def unlearn(
        self,
        new: Sequence[NewRequest],
        *,
        keep_sealed: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> HeadOutcome:
        """Solve the head without what these requests name, and store it, unless it costs more than `limits` allow or
        takes the last row of a class that nobody asked to forget; `limits.force` answers all the same."""
        trial = self._trials.tried(new, keep_sealed=keep_sealed, limits=limits)
        if trial.declined is not None:
            return self._declined(trial)
        for described_request in trial.requests:
            described_request |= {"verdict": None, "withheld": False, "notes": list(trial.report.notes)}
        return self._settle("unlearned", trial.requests, trial)

    @property
    def _trials(self) -> Trials:
        return Trials(self.model, self.writer.state, self.clients, self.judge, self.describe)

    def restore(self, requests: Sequence[Request]) -> HeadOutcome:
        """Add again what these requests took."""
        before = self._trials.measured(self.model.requests)
        report = self.model.restore([request.forget for request in requests], clients=self.clients)
        return self._settle("restored", [request.id for request in requests], self._trials.after(report, before))

    def add(
        self, grown: Federation | Contact, rows: Mapping[int, Collection[int]], added: Mapping[str, Any]
    ) -> HeadOutcome:
        """Add rows of known clients, and clients that join, in one step. `grown` is the federation with them, or the
        way to clients that have them."""
        model, judge = self.model, HeadJudge(grown) if self.judge and isinstance(grown, Federation) else None
        desk = replace(self, clients=grown, judge=judge)
        known = model.store.known_clients if isinstance(model, HeadModel) else model.cohort.hashes.keys()
        growing = {client: ids for client, ids in rows.items() if client in known}
        if growing and not isinstance(model, HeadModel):
            listed = ", ".join(map(str, sorted(growing)))
            raise RequestError(
                f"Only totals are kept here, and new rows of client {listed} cannot be added to a message that is "
                "part of them. Let the rows join as a client of their own. Nothing was changed."
            )
        before, contact, report = desk._trials.measured(model.requests), model.contact(grown), Report(model.requests)
        assert contact is not None
        sent = contact.traffic
        if joining := sorted(rows.keys() - growing.keys()):
            report = model.add_clients(contact, joining)
        if growing and isinstance(model, HeadModel):
            notes, report = report.notes, model.add_samples(contact, growing)
            report.notes[:0] = notes
        report.clients_contacted, report.traffic = sorted(rows), contact.traffic - sent
        return desk._settle("added", [], desk._trials.after(report, before), {"added": dict(added)})

    def purge(self) -> tuple[list[CellName], dict[str, Any]]:
        """Destroy what the folder keeps of forgotten rows, cached features included; and what is claimed now."""
        federation = self.clients if isinstance(self.clients, Federation) else None
        if federation is None and self.model.cache.rows:
            raise RequestError(
                "The data set is not here, so nobody can tell which cached features are of forgotten rows. Bring "
                f"it back, or delete clients/{FEATURES}: features are computed anew then. Nothing was changed."
            )
        cells = self.model.purge(clients=federation)
        totals, claim = self.model.totals_hash(salt_of(self.writer.state)), self._claim(None, None)
        claim["totals"] = {"before": totals, "after": totals}
        body = {"cells": [list(cell) for cell in cells], "centroids": self._store().to_json(), "claim": claim}
        self.writer.commit("purged", body)
        return cells, claim

    def _declined(self, trial: Trial) -> HeadOutcome:
        state, report = self.writer.state, trial.report
        event: dict[str, Any] = {"requests": [], "declined": trial.requests, "step": "unlearned", "why": trial.declined}
        event |= {"time_s": dict(report.time_s), "classes": trial.harmed, "class_recall": trial.recalls_json}
        self.writer.commit("declined", {**self.facts, **contact_facts(report), **event})
        assert state.filter is not None  # else there was no model to ask
        ids = [request["id"] for request in trial.requests]
        in_force = [request.id for request in state.active]
        return HeadOutcome(ids, state.filter, report, None, in_force, trial.declined, trial.recalls, trial.requests)

    def _settle(self, step: str, requests: Any, trial: Trial, more: Mapping[str, Any] | None = None) -> HeadOutcome:
        state, report, before = self.writer.state, trial.report, trial.before
        ids = [request["id"] if isinstance(request, dict) else request for request in requests]
        with report.stage("store"):
            head = self.writer.put("head", lambda path: write_head(self.model, path))
            statistics = self._store()
        active = [request.id for request in state.active if request.id not in ids]
        claim = self._claim(before.figures, trial.after)
        claim["totals"] = {"before": before.totals, "after": self.model.totals_hash(salt_of(state))}
        body = {
            **self.facts,
            "requests": requests,
            **contact_facts(report),
            "figures": None,
            "erasure": None,
            "class_recall": trial.recalls_json,
            "centroids_used": report.centroids_used,
            "notes": list(report.notes),
            "pending": describe_pending(report),
            "forced": [],
            "base": self.model.base_fingerprint,
            "active": active + (ids if step == "unlearned" else []),
            "filter": head.to_json(),
            "config": described(self.model)["rule"],
            "centroids": statistics.to_json(),
            "claim": claim,
            "time_s": dict(report.time_s),
            **(more or {}),
        }
        self.writer.commit(step, body)
        if self.clients is not None and not isinstance(self.clients, Federation):
            self.clients.settled()
        return HeadOutcome(ids, head, report, claim, body["active"], recalls=trial.recalls, entries=trial.requests)

    def _claim(self, before: Figures | None, after: Figures | None) -> dict[str, Any]:
        measured = {"before": before, "after": after} if before and after else None
        return {**claim_here(self.model, self.clients).to_json(), "accuracy": measured}

    def _store(self) -> FileRecord:
        model = self.model
        if isinstance(model, CohortModel):
            return self.writer.put("centroids", model.save)
        return self.writer.put("centroids", lambda path: save_centroids(model.store, path))
