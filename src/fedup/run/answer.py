"""Requests answered in a run folder: fitted, judged, stored, and only then in force."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedup.clients.protocol import Contact
from fedup.errors import HarmError, RequestError, SettingError
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.run.folder import Writer
from fedup.run.state import FileRecord, Request, State
from fedup.serving.filter_file import save_filter
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import CellName, Centroids
from fedup.statistics.store_file import save_centroids
from fedup.statistics.traffic import Release
from fedup.unlearning.plan import Terms
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import purge as purge_cells
from fedup.unlearning.unlearn import restore as take_back
from fedup.unlearning.unlearn import unlearn as fit_and_serve

_LONGEST_REFERENCE = 200
_Requests = Sequence[dict[str, Any]] | Sequence[str]  # as in an event: new ones whole, others by number

# Accuracies by state of the model (original, forgotten, restored), part of the data and side (retain, forget).
Figures = Mapping[str, Any]
Judge = Callable[[PluggedModel, Collection[Forget]], Figures]  # measures a model for the requests in force


@dataclass(frozen=True)
class NewRequest:
    """A request as it comes in; the reference is the operator's own (a ticket, a letter)."""

    forget: Forget
    reference: str | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)  # how many rows it names, and the hash of their ids

    def __post_init__(self) -> None:
        text = self.reference
        if text is not None and not (text.isprintable() and 0 < len(text) <= _LONGEST_REFERENCE):
            raise RequestError(
                f"A reference is 1 to {_LONGEST_REFERENCE} printable characters on one line; found {text[:50]!a}."
            )


@dataclass
class Outcome:
    """The result; `declined` says why no filter was put in force, `withheld` which requests stay open."""

    requests: Sequence[str]
    filter: FileRecord | None
    report: Report
    figures: Figures | None
    declined: str | None = None
    withheld: Sequence[str] = ()


@dataclass(frozen=True)
class Limits:
    """What a filter may cost to be put in force, in points: retained validation accuracy (None: not measured), and each
    class's recall on retained rows. `force` lifts both limits."""

    max_loss: float | None = 3.0
    force: bool = False
    max_class_loss: float = 5.0

    def __post_init__(self) -> None:
        if self.max_loss is not None and not self.max_loss >= 0:  # NaN would allow everything
            raise SettingError(f"max_loss, in points of accuracy, must be 0 or more; found {self.max_loss}.")

    def refusal(self, figures: Figures | None) -> str | None:
        """Why the filter may not be put in force, in words; None when it may."""
        if self.force or self.max_loss is None:
            return None
        states = ("original", "forgotten")
        before, after = (figures[state]["validation"]["retain"] if figures else None for state in states)
        if before is None or after is None:
            return "the retained accuracy could not be measured, because there is no validation data at hand"
        loss = 100 * (before - after)
        if loss <= self.max_loss:
            return None
        return (
            f"it would lower the retained accuracy on validation data by {loss:.1f} points "
            f"({before:.3f} to {after:.3f}), and {self.max_loss:g} are allowed"
        )


@dataclass(frozen=True, eq=False)
class RequestDesk:
    """A run folder open for writing, with the model, centroids and clients that answer its requests.

    `facts` go into each event unchanged. After a declined answer, make a new desk with model and centroids loaded anew.
    """

    writer: Writer
    plugged: PluggedModel
    centroids: Centroids | None
    clients: Federation | Contact | None = None
    judge: Judge | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def unlearn(
        self,
        new: Sequence[NewRequest],
        *,
        config: FilterConfig | None = None,
        keep_sealed: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> Outcome:
        """Fit a filter for the requests in force and these, and put it in force unless it costs too much."""
        if self.centroids is None:
            raise RequestError("There are no centroids to answer requests from: collect them first.")
        requests = described_requests(self.writer.state, new)
        self.plugged.check_base(hashed=True)  # evidence will name these weights
        try:
            report = fit_and_serve(
                self.plugged,
                self.centroids,
                [request.forget for request in new],
                clients=self.clients,
                config=config,
                force=limits.force,
                terms=Terms(limits.max_class_loss, keep_sealed=keep_sealed),
            )
        except HarmError as error:
            return self._refused("unlearned", requests, error)
        for described, request in zip(requests, new, strict=True):
            verdict = report.verdicts.get(request.forget.digest)
            described |= {
                "verdict": verdict.to_json() if verdict else None,
                "withheld": request.forget in report.withheld,
                "notes": report.notes_about.get(request.forget.digest, []),
            }
        return self._settle("unlearned", requests, report, limits)

    def restore(self, requests: Sequence[Request], *, limits: Limits = Limits()) -> Outcome:  # noqa: B008 (frozen)
        """Take requests back: a filter for the remaining requests, or none after the last."""
        ids = [request.id for request in requests]
        self.plugged.check_base(hashed=True)
        try:
            report = take_back(
                self.plugged,
                self.centroids,
                [request.forget for request in requests],
                clients=self.clients,
                force=limits.force,
                terms=Terms(limits.max_class_loss),
            )
        except HarmError as error:
            return self._refused("restored", ids, error)
        return self._settle("restored", ids, report, limits)

    def purge(self) -> list[CellName]:
        """Destroy the sealed cells: no file of the folder holds them any more."""
        if self.centroids is None:
            raise RequestError("There are no centroids, so nothing is sealed and nothing to purge.")
        cells = purge_cells(self.plugged, self.centroids)
        record = self._store_centroids(self.centroids)
        self.writer.commit("purged", {"cells": [list(cell) for cell in cells], "centroids": record.to_json()})
        return cells

    def _refused(self, step: str, requests: _Requests, error: HarmError) -> Outcome:
        """An answer that would harm a class nobody asked to forget: noted with what clients sent, and nothing else."""
        report = error.report or Report(self.plugged.requests)
        return self._declined(step, requests, report, str(error), {"classes": error.classes, **contact_of(report)})

    def _declined(self, step: str, requests: _Requests, report: Report, why: str, body: Mapping[str, Any]) -> Outcome:
        event = {"requests": [], "declined": requests, "step": step, "why": why, "time_s": dict(report.time_s)}
        self.writer.commit("declined", {**self.facts, **body, **event})
        return Outcome(_ids(requests), self.writer.state.filter, report, body.get("figures"), declined=why)

    def _settle(self, step: str, requests: _Requests, report: Report, limits: Limits) -> Outcome:
        """Measure the new filter, store it and commit; or only note that it was declined."""
        state, served, ids = self.writer.state, self.plugged.served, _ids(requests)
        withheld = [request["id"] for request in requests if isinstance(request, dict) and request["withheld"]]
        swapped = step == "restored" or len(withheld) < len(ids)  # else the filter served before still is
        with report.stage("measure"):
            figures = self.judge(self.plugged, report.requests) if self.judge and served and swapped else None
        body = {
            "figures": figures,
            **contact_of(report),
            "centroids_used": report.centroids_used,
            "erasure": report.erasure,
            "notes": list(report.notes),
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
            touched = report.cells_replaced or report.clients_contacted or reopened
            changed = self._store_centroids(self.centroids) if self.centroids is not None and touched else None
        active = [request.id for request in state.active if request.id not in ids]
        if step == "unlearned":
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
        return Outcome(ids, stored, report, figures, withheld=withheld)

    def _store_centroids(self, centroids: Centroids) -> FileRecord:
        return self.writer.put("centroids", lambda path: save_centroids(centroids, path))


def described_requests(state: State, new: Sequence[NewRequest]) -> list[dict[str, Any]]:
    """The new requests as the journal holds them; an open one keeps its id and its reference."""
    references = {request.forget: request.reference for request in state.open}
    ids: dict[Forget, str] = {request.forget: request.id for request in state.open}
    for request in new:
        ids.setdefault(request.forget, state.next_id(len(ids) - len(references)))
    return [
        {
            "id": ids[request.forget],
            "reference": request.reference or references.get(request.forget),
            "kind": request.forget.kind,
            "forget": request.forget.to_json(),
            "digest": request.forget.digest,
            "rows": dict(request.rows),
        }
        for request in new
    ]


def _ids(requests: _Requests) -> list[str]:
    return [request["id"] if isinstance(request, dict) else request for request in requests]


def contact_of(report: Report) -> dict[str, Any]:
    """Which clients were asked, and what was sent."""
    return {
        "clients_contacted": sorted(report.clients_contacted),
        "clients_counting": sorted(set(report.clients_counting)),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "messages": report.traffic.messages,
        "releases": describe_releases(report.releases),
    }


def describe_releases(sent: Iterable[Release]) -> list[dict[str, Any]]:
    """Messages of clients as the journal holds them, each with its guarantee or none."""
    plain = ("client", "what", "cells", "mechanism", "sigma", "name")
    return [
        {
            **{name: getattr(release, name) for name in plain},
            "bytes": release.size_bytes,
            "guarantee": asdict(release.guarantee) if release.guarantee else None,
        }
        for release in sorted(sent, key=lambda release: release.client)
    ]
