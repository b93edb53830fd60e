"""Requests answered in a run folder: fitted, judged, stored, and only then in force."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedup.clients.protocol import Contact
from fedup.errors import HarmError, RequestError
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.run.folder import Writer
from fedup.run.limits import Figures, Judge, Limits
from fedup.run.new_request import NewRequest as NewRequest
from fedup.run.pool import Pool, check_return, sort_out
from fedup.run.state import FileRecord, Request, State
from fedup.serving.filter_file import save_filter
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import CellName, Centroids
from fedup.statistics.store_file import save_centroids
from fedup.statistics.traffic import Release, Traffic
from fedup.unlearning.collect_again import collect_again as ask_anew
from fedup.unlearning.pending import finish_pending as finish
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import contact_of, resolved
from fedup.unlearning.unlearn import purge as purge_cells
from fedup.unlearning.unlearn import restore as take_back
from fedup.unlearning.unlearn import unlearn as fit_and_serve
from fedup.unlearning.verdict import waits

_Requests = Sequence[dict[str, Any]] | Sequence[str]  # as in an event: new ones whole, others by number


@dataclass
class Outcome:
    """The result; `declined` says why no filter was put in force, `withheld` which requests stay open, `waiting` which
    wait for others. `entries` has all of them, as the journal does."""

    requests: Sequence[str]
    filter: FileRecord | None
    report: Report
    figures: Figures | None
    declined: str | None = None
    withheld: Sequence[str] = ()
    waiting: Sequence[str] = ()
    entries: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, eq=False)
class RequestDesk:
    """A run folder open for writing, with the model, centroids and clients that answer its requests.

    `facts` go into each event unchanged. `describe` checks a request and says which rows it names. After a declined
    answer, make a new desk with model and centroids loaded anew.
    """

    writer: Writer
    plugged: PluggedModel
    centroids: Centroids | None
    clients: Federation | Contact | None = None
    judge: Judge | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    describe: Callable[[NewRequest], NewRequest] = lambda request: request

    def unlearn(
        self,
        new: Sequence[NewRequest],
        *,
        config: FilterConfig | None = None,
        keep_sealed: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        pending: bool = False,
    ) -> Outcome:
        """Fit a filter for the requests in force and these, and put it in force unless it costs too much.

        Clients are asked first which rows the persons of a request have. A request with too few rows waits, unless
        `limits` force an answer; it is answered with later ones for samples or persons, or with `pending` now, if
        there are enough.
        """
        if self.centroids is None:
            raise RequestError("There are no centroids to answer requests from: collect them first.")
        self.plugged.check_base(hashed=True)  # evidence will name these weights
        contact, before = contact_of(self.clients, self.plugged, self.centroids), Traffic()
        if contact is not None:
            before = contact.traffic
        new = [self.describe(self._resolved(request, contact)) for request in new]
        pool = Pool(new, alone=new)
        if not limits.force:
            pool = sort_out(self.writer.state, self.centroids, new, contact, pending=pending)
        kept = self._keep_waiting(pool, Traffic() if contact is None else contact.traffic - before)
        if not pool.ready:
            ids = [request.id for request in self.writer.state.waiting] if pending else [own["id"] for own in kept]
            return Outcome([], self.writer.state.filter, Report(self.plugged.requests), None, waiting=ids, entries=kept)
        if kept and contact is not None:
            before = contact.traffic
        outcome = self._answer(pool.ready, pool.alone, contact, before, config, keep_sealed, limits)
        outcome.waiting = [own["id"] for own in kept]
        outcome.entries = [*outcome.entries, *kept]
        return outcome

    def _answer(
        self,
        ready: Sequence[NewRequest],
        alone: Sequence[NewRequest],
        contact: Contact | None,
        before: Traffic,
        config: FilterConfig | None,
        keep_sealed: bool,
        limits: Limits,
    ) -> Outcome:
        """Answer requests together; if that harms a class, those alone that need none of the requests that waited."""
        requests = described_requests(self.writer.state, ready)
        try:
            report = fit_and_serve(
                self.plugged,
                self.centroids,  # type: ignore[arg-type]  # unlearn has checked it
                [request.forget for request in ready],
                clients=contact,
                config=config,
                force=limits.force,
                terms=limits.terms(self.judge, self.plugged, keep_sealed=keep_sealed),
            )
        except HarmError as error:
            if alone and len(alone) < len(ready):
                return self._answer(alone, [], contact, before, config, keep_sealed, limits)
            return self._refused("unlearned", requests, error)
        if contact is not None:
            report.traffic = contact.traffic - before
        for described, request in zip(requests, ready, strict=True):
            verdict = report.verdicts.get(request.forget.digest)
            described |= {
                "verdict": verdict.to_json() if verdict else None,
                "withheld": request.forget in report.withheld,
                "notes": report.notes_about.get(request.forget.digest, []),
            }
        return self._settle("unlearned", requests, report, limits)

    def _resolved(self, request: NewRequest, contact: Contact | None) -> NewRequest:
        """The request with the rows of its persons; one that is known already is not asked about again."""
        state = self.writer.state
        if any(request.forget.as_named == own.forget.as_named for own in state.active):
            raise RequestError(f"The request to {request.forget} is active already; nothing was changed.")
        for known in (*state.open, *state.waiting):
            if not request.forget.is_resolved and request.forget == known.forget.as_named:
                return replace(request, forget=known.forget)
        return replace(request, forget=resolved(request.forget, contact, self.centroids))

    def _keep_waiting(self, pool: Pool, traffic: Traffic) -> list[dict[str, Any]]:
        """Put new requests that have to wait on record, with what clients sent to find that out."""
        if not pool.waiting:
            return []
        report = Report(self.plugged.requests, traffic=traffic, clients_contacted=sorted(traffic.by_client))
        entries = described_requests(self.writer.state, pool.waiting)
        for described, request in zip(entries, pool.waiting, strict=True):
            verdict = waits(pool.why[request.forget]).to_json()
            described |= {"verdict": verdict, "withheld": False, "notes": []}
        known = {request.id for request in self.writer.state.waiting}
        if any(entry["id"] not in known for entry in entries):
            body = {**contact_facts(report), "forced": [], "time_s": {}, "base": self.plugged.base_fingerprint}
            if self.centroids is not None and self.centroids.unnamed:  # who has yet to name rows of their persons
                body["centroids"] = self._store_centroids(self.centroids).to_json()
            self.writer.commit("waiting", {**self.facts, "requests": entries, **body})
        return entries

    def restore(self, requests: Sequence[Request], *, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (frozen)
        """Take requests back: a filter for the remaining requests, or none after the last. For requests that waited
        there is nothing to change."""
        withdrawn = [request.id for request in requests if request.is_waiting or request.is_queued]
        requests = [request for request in requests if request.id not in withdrawn]
        if self.centroids is not None:
            check_return(self.writer.state, self.centroids, requests)
        if withdrawn:
            self.writer.commit("withdrawn", {**self.facts, "requests": withdrawn})
        if withdrawn and not requests:
            return Outcome(withdrawn, self.writer.state.filter, Report(self.plugged.requests), None)
        ids = [request.id for request in requests]
        self.plugged.check_base(hashed=True)
        try:
            report = take_back(
                self.plugged,
                self.centroids,
                [request.forget for request in requests],
                clients=self.clients,
                force=limits.force,
                terms=limits.terms(self.judge, self.plugged),
            )
        except HarmError as error:
            return self._refused("restored", ids, error)
        return self._settle("restored", ids, report, limits)

    def finish_pending(self, *, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (frozen)
        """Ask the clients again that had not answered, and put the filter in force that their answers allow."""
        state, store, asked = self.writer.state, self.centroids, {own.forget: own for own in self.writer.state.active}
        if store is None or not store.pending or not asked:
            return Outcome([], state.filter, Report(self.plugged.requests), None)
        if self.clients is None:
            raise RequestError("What is pending needs the clients, and there is no way to reach them.")
        self.plugged.check_base(hashed=True)
        try:
            terms = limits.terms(self.judge, self.plugged)
            report = finish(self.plugged, store, clients=self.clients, force=limits.force, terms=terms)
        except HarmError as error:
            return self._refused("renewed", [], error)
        entries = []
        for forget, request in asked.items():
            named = next((own for own in report.requests | report.withheld if own.as_named == forget.as_named), forget)
            verdict = report.verdicts.get(named.digest)
            if verdict is not None:
                notes = report.notes_about.get(named.digest, [])
                about = {
                    "forget": named.to_json(),
                    "digest": named.digest,
                    "verdict": verdict.to_json(),
                    "notes": notes,
                }
                entries.append({**request.entry, **about, "withheld": named in report.withheld})
        return self._settle("renewed", entries, report, limits)

    def collect_again(self, ids: Collection[int], *, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (frozen)
        """Ask some clients anew for their statistics, and make the filter in force again with them."""
        if self.centroids is None or self.clients is None:
            raise RequestError("To collect from single clients needs a first collection, and a way to reach them.")
        if self.writer.state.finished:
            raise RequestError(
                "The model was trained anew without some requests: collect from all clients, which leaves them out. "
                "Single ones cannot be asked any more. Nothing was changed."
            )
        self.plugged.check_base(hashed=True)
        options: Any = {"force": limits.force, "terms": limits.terms(self.judge, self.plugged)}
        try:
            store, report = ask_anew(self.plugged, self.centroids, ids, clients=self.clients, **options)
        except HarmError as error:
            return self._refused("renewed", [], error)
        return replace(self, centroids=store)._settle("renewed", [], report, limits)

    def purge(self) -> list[CellName]:
        """Destroy the sealed cells: no file of the folder holds them any more."""
        if self.centroids is None:
            raise RequestError("There are no centroids, so nothing is sealed and nothing to purge.")
        served, cells = self.plugged.served, purge_cells(self.plugged, self.centroids)
        body = {"cells": [list(cell) for cell in cells], "centroids": self._store_centroids(self.centroids).to_json()}
        if self.plugged.served is not served:  # a delta lost whose changes it holds
            body["filter"] = self.writer.put("filter", lambda path: save_filter(self.plugged, path)).to_json()
        self.writer.commit("purged", body)
        return cells

    def _refused(self, step: str, requests: _Requests, error: HarmError) -> Outcome:
        """An answer that would harm a class nobody asked to forget: noted with what clients sent, and nothing else."""
        report = error.report or Report(self.plugged.requests)
        pending = [{"client": client, "part": part} for client, part in sorted(report.pending.items())]
        body = {"classes": error.classes, "pending": pending, **contact_facts(report)}
        return self._declined(step, requests, report, str(error), body)

    def _declined(self, step: str, requests: _Requests, report: Report, why: str, body: Mapping[str, Any]) -> Outcome:
        event = {"requests": [], "declined": requests, "step": step, "why": why, "time_s": dict(report.time_s)}
        self.writer.commit("declined", {**self.facts, **body, **event})
        entries = [own for own in requests if isinstance(own, dict)]
        figures = body.get("figures")
        return Outcome(_ids(requests), self.writer.state.filter, report, figures, declined=why, entries=entries)

    def _settle(self, step: str, requests: _Requests, report: Report, limits: Limits) -> Outcome:
        """Measure the new filter, store it and commit; or only note that it was declined."""
        state, served, ids = self.writer.state, self.plugged.served, _ids(requests)
        withheld = [request["id"] for request in requests if isinstance(request, dict) and request["withheld"]]
        swapped = step != "unlearned" or len(withheld) < len(ids)  # else the filter served before still is
        with report.stage("measure"):
            figures = self.judge(self.plugged, report.requests) if self.judge and served and swapped else None
        body = {
            "figures": figures,
            **contact_facts(report),
            "centroids_used": report.centroids_used,
            "erasure": report.erasure,
            "delta": report.delta,
            "notes": list(report.notes),
            "pending": describe_pending(report),
            "erased_rows_kept": len(self.centroids.eraser_parts) if self.centroids is not None else 0,
            "forced": list(report.forced),
            "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
            "base": self.plugged.base_fingerprint,
        }
        refusal = limits.refusal(figures) if served and swapped else None
        if refusal:
            return self._declined(step, requests, report, refusal, body)
        with report.stage("store"):
            stored = state.filter if served else None
            if served and swapped:
                stored = self.writer.put("filter", lambda path: save_filter(self.plugged, path))
            reopened = withheld or any(request.id in ids for request in state.open)
            touched = report.cells_replaced or report.clients_contacted or reopened or report.pending or state.pending
            changed = self._store_centroids(self.centroids) if self.centroids is not None and touched else None
        active = [request.id for request in state.active if request.id not in ids]
        if step != "restored":
            active += [name for name in ids if name not in withheld]
        body |= {
            "active": active,
            "filter": stored.to_json() if stored else None,
            "config": served.settings if served else None,
            "centroids": changed.to_json() if changed else None,
            "time_s": dict(report.time_s),
        }
        self.writer.commit(step, {**self.facts, "requests": requests, **body})
        if self.clients is not None and not isinstance(self.clients, Federation):
            self.clients.settled()  # the folder holds their answers now; those of a declined request stay cached
        entries = [own for own in requests if isinstance(own, dict)]
        return Outcome(ids, stored, report, figures, withheld=withheld, entries=entries)

    def _store_centroids(self, centroids: Centroids) -> FileRecord:
        return self.writer.put("centroids", lambda path: save_centroids(centroids, path))


def described_requests(state: State, new: Sequence[NewRequest]) -> list[dict[str, Any]]:
    """The new requests as the journal holds them; an open, waiting or queued one keeps its id and its reference."""
    known = (*state.open, *state.waiting, *state.queued)
    references = {request.forget.as_named: request.reference for request in known}
    ids: dict[Forget, str] = {request.forget.as_named: request.id for request in known}
    for request in new:
        ids.setdefault(request.forget.as_named, state.next_id(len(ids) - len(references)))
    return [
        {
            "id": ids[request.forget.as_named],
            "reference": request.reference or references.get(request.forget.as_named),
            "kind": request.forget.kind,
            "forget": request.forget.queued_json(),
            "digest": request.forget.digest,
            "rows": dict(request.rows),
        }
        for request in new
    ]


def _ids(requests: _Requests) -> list[str]:
    return [request["id"] if isinstance(request, dict) else request for request in requests]


def contact_facts(report: Report) -> dict[str, Any]:
    """Which clients were asked, and what was sent."""
    return {
        "clients_contacted": sorted(report.clients_contacted),
        "clients_counting": sorted(set(report.clients_counting)),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "messages": report.traffic.messages,
        "releases": describe_releases(report.releases),
    }


def describe_pending(report: Report) -> list[dict[str, Any]]:
    """What waits for clients that have not answered, as the journal holds it."""
    return [{"client": client, "part": part} for client, part in sorted(report.pending.items())]


def describe_releases(sent: Iterable[Release]) -> list[dict[str, Any]]:
    """Messages of clients as the journal holds them, each with its guarantee or none."""
    plain = ("client", "what", "cells", "mechanism", "sigma", "name")
    guarantees: dict[DP | None, dict[str, Any] | None] = {None: None}
    described = []
    for release in sorted(sent, key=lambda release: release.client):
        if release.guarantee not in guarantees:
            guarantees[release.guarantee] = asdict(release.guarantee)  # type: ignore[arg-type]  # None is there
        own = {name: getattr(release, name) for name in plain}
        described.append({**own, "bytes": release.size_bytes, "guarantee": guarantees[release.guarantee]})
    return described
