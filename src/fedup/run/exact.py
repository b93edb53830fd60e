"""A run folder in exact mode: a head on a public backbone, its statistics, and what is claimed after each request."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fedup.clients.protocol import Contact
from fedup.errors import ArtifactError, HarmError, RequestError
from fedup.federation import Federation
from fedup.filters.ridge_head import solve_head
from fedup.models.backbone import Backbone
from fedup.request import Forget, union
from fedup.run.answer import NewRequest, contact_facts, describe_pending, described_requests
from fedup.run.folder import Run, Writer
from fedup.run.in_words import ids as ids_in_words
from fedup.run.record import keep_centroids
from fedup.run.serving import load_store
from fedup.run.state import FileRecord, Request, State
from fedup.statistics.feature_cache import FeatureCache
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName
from fedup.statistics.store_file import save_centroids
from fedup.unlearning.claim import Claim, totals_hash, with_features
from fedup.unlearning.exact import HeadModel, described
from fedup.unlearning.exact_file import read_head, write_head
from fedup.unlearning.report import Report

Figures = Mapping[str, Any]
HeadJudge = Callable[[HeadModel, frozenset[Forget]], Figures]  # measures a model on what requests name and leave
FEATURES = "features.safetensors"  # what clients keep, where all of them are on this machine


def keep_head(writer: Writer, model: HeadModel, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Store a head that was learned, and its statistics; the backbone is public and is not stored."""
    keep_centroids(writer, model.store, {name: facts[name] for name in ("time_s", "machine") if name in facts})
    salt = secrets.token_hex(16)
    body = {
        "model": None,
        "head": writer.put("head", lambda path: write_head(model, path)).to_json(),
        "fingerprint": model.base_fingerprint,
        "salt": salt,
        "totals": model.totals_hash(salt),
        "features": {**model.cache.about, "sha256": model.cache.digest, "rows": model.cache.rows},
        "exact": described(model),
        **facts,
    }
    writer.commit("trained", body)
    return body


def load_head_of(run: Run, state: State, backbone: Backbone, *, cache: FeatureCache | None = None) -> HeadModel:
    """The model that the folder serves; raises where its parts do not fit each other."""
    if state.trained is None or state.filter is None:
        raise RequestError(f"{run.path} has no learned head yet: run `fedup train --run {run.path}` to the end.")
    store = load_store(run, state)
    if not isinstance(store, MomentStore):
        raise ArtifactError(f"The statistics in {run.path} are no moments: take a good copy of the folder.")
    model = read_head(backbone, store, run.files.path(state.filter), cache=cache)
    if model.requests != state.forgets:
        raise ArtifactError(
            f"The head in {run.path} was not learned for the requests in force "
            f"({', '.join(request.id for request in state.active) or 'none'}). Take a good copy of the folder."
        )
    return model


def salt_of(state: State) -> str:
    """With which hashes of totals are salted; it stays in the folder."""
    return str(state.trained.body["salt"]) if state.trained else ""


@dataclass
class HeadOutcome:
    """The result of a request in exact mode."""

    requests: Sequence[str]
    head: FileRecord
    report: Report
    claim: dict[str, Any] | None
    in_force: Sequence[str]
    declined: str | None = None  # why nothing was changed


class _Before(NamedTuple):
    """A model before a request: which requests it is measured for, its figures, and the hash of its totals."""

    judged: frozenset[Forget]
    figures: Figures | None
    totals: str


@dataclass(frozen=True, eq=False)
class HeadDesk:
    """A run folder open for writing, with the head and the clients that answer its requests. `facts` go into each event
    unchanged."""

    writer: Writer
    model: HeadModel
    clients: Federation | Contact | None = None
    judge: HeadJudge | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def unlearn(self, new: Sequence[NewRequest], *, keep_sealed: bool = False, force: bool = False) -> HeadOutcome:
        """Solve the head without what these requests name, and store it; without `force` a request is declined that
        would take the last row of a class that nobody asked to forget."""
        requests = described_requests(self.writer.state, new)
        named = frozenset(each.forget for each in new)
        before = self._measured(self.model.requests | named)
        try:
            report = self.model.unlearn(named, clients=self.clients, keep_sealed=keep_sealed, force=force)
        except HarmError as error:
            return self._declined(requests, error.report or Report(self.model.requests), error.classes)
        for described_request in requests:
            described_request |= {"verdict": None, "withheld": False, "notes": list(report.notes)}
        return self._settle("unlearned", requests, report, before)

    def restore(self, requests: Sequence[Request]) -> HeadOutcome:
        """Add again what these requests took."""
        before = self._measured(self.model.requests)
        report = self.model.restore([request.forget for request in requests], clients=self.clients)
        return self._settle("restored", [request.id for request in requests], report, before)

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

    def _declined(self, requests: list[dict[str, Any]], report: Report, harmed: list[int]) -> HeadOutcome:
        state = self.writer.state
        classes = ids_in_words(harmed, names=state.about.get("class_names", ()))
        why = f"No row would be left of class {classes}, which nobody asked to forget. Nothing was changed."
        event = {"requests": [], "declined": requests, "step": "unlearned", "why": why, "time_s": dict(report.time_s)}
        self.writer.commit("declined", {**self.facts, "classes": harmed, **contact_facts(report), **event})
        assert state.filter is not None  # else there was no model to ask
        ids = [request["id"] for request in requests]
        return HeadOutcome(ids, state.filter, report, None, [request.id for request in state.active], why)

    def _measured(self, judged: frozenset[Forget]) -> _Before:
        figures = self.judge(self.model, judged) if self.judge else None
        return _Before(judged, figures, self.model.totals_hash(salt_of(self.writer.state)))

    def _settle(self, step: str, requests: Any, report: Report, before: _Before) -> HeadOutcome:
        state = self.writer.state
        ids = [request["id"] if isinstance(request, dict) else request for request in requests]
        with report.stage("measure"):
            after = self.judge(self.model, before.judged) if self.judge else None
        with report.stage("store"):
            head = self.writer.put("head", lambda path: write_head(self.model, path))
            statistics = self._store()
        active = [request.id for request in state.active if request.id not in ids]
        claim = self._claim(before.figures, after)
        claim["totals"] = {"before": before.totals, "after": self.model.totals_hash(salt_of(state))}
        body = {
            **self.facts,
            "requests": requests,
            **contact_facts(report),
            "figures": None,
            "erasure": None,
            "class_recall": {},
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
        }
        self.writer.commit(step, body)
        if self.clients is not None and not isinstance(self.clients, Federation):
            self.clients.settled()
        return HeadOutcome(ids, head, report, claim, body["active"])

    def _claim(self, before: Figures | None, after: Figures | None) -> dict[str, Any]:
        measured = {"before": before, "after": after} if before and after else None
        return {**claim_here(self.model, self.clients).to_json(), "accuracy": measured}

    def _store(self) -> FileRecord:
        return self.writer.put("centroids", lambda path: save_centroids(self.model.store, path))


def claim_here(model: HeadModel, clients: Federation | Contact | None) -> Claim:
    """What may be claimed of a folder: of the model, and of the features that clients of this process keep."""
    if clients is None:  # nobody can tell whose features they are
        return with_features(model.claim, model.cache.rows)
    if not isinstance(clients, Federation):  # each node keeps its own
        return model.claim
    return with_features(model.claim, model.cache.rows_of(clients.forgotten(union(model.requests))))


# --- checks


def relearned(model: HeadModel, clients: Federation | Contact, salt: str) -> tuple[str, str]:
    """The hash of the totals served, and of those that the remaining clients add up to now."""
    return model.totals_hash(salt), totals_hash(model.relearn(clients), model.store.config, salt)


def extracted_again(model: HeadModel, federation: Federation) -> dict[str, float]:
    """Features computed anew: the share of integers that agree with the cached ones, and by how much answers differ."""
    fresh = HeadModel(model.backbone, model.store.to("cpu"), rule=model.rule, requests=model.requests)
    fresh.relearn(federation)
    cached = model.cache.values
    if cached is None:
        model.relearn(federation)
        cached = model.cache.values
    computed = fresh.cache.values
    if cached is None or computed is None:
        raise RequestError("There are no features to compare: no client has rows that are retained.")
    rows = (model.cache.status > 0) & (fresh.cache.status > 0)
    fresh.head.put(solve_head(fresh.relearn(federation), model.store.config, model.rule))
    features = cached[rows].double() * model.store.config.step
    with torch.no_grad():
        answers, others = (each.head(features.to(each.head.weight)).softmax(1) for each in (model, fresh))
    return {
        "rows": int(rows.sum()),
        "agree": float((cached[rows] == computed[rows]).double().mean()),
        "largest_difference": float((answers - others).abs().max()),
    }


def check_head(run: Run, state: State, blank: nn.Module) -> str:
    """The head, its statistics and the hash of totals on record fit each other; in words."""
    backbone = blank.get_submodule("backbone")
    assert isinstance(backbone, Backbone)
    model, noted = load_head_of(run, state, backbone), last_totals(state)
    if model.totals_hash(salt_of(state)) != noted:
        raise ArtifactError("The totals are not those whose hash is on record. Take a good copy of the folder.")
    claims = [event.body["claim"]["kind"] for event in state.events if "claim" in event.body]
    kind = claims[-1] if claims and model.claim.kind != "suppressed" else model.claim.kind
    return f"solved from its totals {noted}; claim: {kind}"


def last_totals(state: State) -> str:
    """The salted hash of the totals that are served, as the journal has it."""
    claims = [event.body["claim"] for event in state.events if "claim" in event.body]
    return str(claims[-1]["totals"]["after"] if claims else state.trained.body["totals"] if state.trained else "")
