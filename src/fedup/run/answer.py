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
from fedup.run.state import FileRecord, Request
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
# Measures a plugged model for the requests in force; None where there is no data to measure on.
Judge = Callable[[PluggedModel, Collection[Forget]], Figures]


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
    """What came of it; `declined` says why no filter was put in force, `withheld` which requests stay open."""

    requests: Sequence[str]
    filter: FileRecord | None
    report: Report
    figures: Figures | None
    declined: str | None = None
    withheld: Sequence[str] = ()


@dataclass(frozen=True)
class Limits:
    """When a filter may be put in force: at most so many points of retained validation accuracy lost (None: that is not
    measured), and of each class's recall on retained rows; or by force."""

    max_loss: float | None = 3.0
    force: bool = False
    max_class_loss: float = 5.0

    def __post_init__(self) -> None:
        if self.max_loss is not None and not self.max_loss >= 0:  # NaN would allow everything
            raise SettingError(f"max_loss, in points of accuracy, must be 0 or more; found {self.max_loss}.")

    def refusal(self, figures: Figures | None) -> str | None:
        """Why not, in words; None when it may."""
        if self.force or self.max_loss is None:
            return None
        before, after = (_retained(figures, state) for state in ("original", "forgotten"))
        if before is None or after is None:
            return "the retained accuracy could not be measured, because there is no validation data at hand"
        loss = 100 * (before - after)
        if loss > self.max_loss:
            return (
                f"it would lower the retained accuracy on validation data by {loss:.1f} points "
                f"({before:.3f} to {after:.3f}), and {self.max_loss:g} are allowed"
            )
        return None


@dataclass(frozen=True, eq=False)
class RequestDesk:
    """A run folder that is written to, with the model, centroids and clients that answer its requests.

    `facts` go into each event as they are. After an answer was declined, make another with model and centroids loaded
    anew.
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
        requests = self._described(new)
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
        """Take requests back: a filter for the remaining ones, or none after the last."""
        ids = [request.id for request in requests]
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
        """Destroy the sealed cells: from then on they are in no file of the folder."""
        if self.centroids is None:
            raise RequestError("There are no centroids, so nothing is sealed and nothing to purge.")
        cells = purge_cells(self.plugged, self.centroids)
        record = self._store_centroids(self.centroids)
        self.writer.commit("purged", {"cells": [list(cell) for cell in cells], "centroids": record.to_json()})
        return cells

    def _described(self, new: Sequence[NewRequest]) -> list[dict[str, Any]]:
        """The new requests as they stand in the journal; one that is open keeps its number and its reference."""
        state = self.writer.state
        waiting = {request.forget: request for request in state.open}
        ids: dict[Forget, str] = {forget: request.id for forget, request in waiting.items()}
        for request in new:
            ids.setdefault(request.forget, state.next_id(len(ids) - len(waiting)))
        return [
            {
                "id": ids[request.forget],
                "reference": request.reference
                or (waiting[request.forget].reference if request.forget in waiting else None),
                "kind": request.forget.kind,
                "forget": request.forget.to_json(),
                "digest": request.forget.digest,
                "rows": dict(request.rows),
            }
            for request in new
        ]

    def _refused(self, step: str, requests: _Requests, error: HarmError) -> Outcome:
        """An answer that would harm those who did not ask: noted with what clients told; nothing else has changed."""
        report = error.report or Report(self.plugged.requests)
        self._decline(step, requests, report, str(error), {"classes": error.classes, **_contact(report)})
        return Outcome(_ids(requests), self.writer.state.filter, report, None, declined=str(error))

    def _decline(self, step: str, requests: _Requests, report: Report, why: str, body: Mapping[str, Any]) -> None:
        declined = {"requests": [], "declined": requests, "step": step, "why": why, "time_s": dict(report.time_s)}
        self.writer.commit("declined", {**self.facts, **body, **declined})

    def _settle(self, step: str, requests: _Requests, report: Report, limits: Limits) -> Outcome:
        """Measure what was fitted, store it and commit; or only note that it was declined."""
        state, served, ids = self.writer.state, self.plugged.served, _ids(requests)
        withheld = [request["id"] for request in requests if isinstance(request, dict) and request["withheld"]]
        swapped = step == "restored" or len(withheld) < len(ids)  # else what was served before still is
        with report.stage("measure"):
            figures = self.judge(self.plugged, report.requests) if self.judge and served and swapped else None
        body = {
            "figures": figures,
            **_contact(report),
            "centroids_used": report.centroids_used,
            "erasure": report.erasure,
            "notes": list(report.notes),
            "forced": list(report.forced),
            "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
            "base": self.plugged.base_fingerprint,
        }
        refusal = limits.refusal(figures) if served and swapped else None
        if refusal:
            self._decline(step, requests, report, refusal, body)
            return Outcome(ids, state.filter, report, figures, declined=refusal)
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
            self.clients.settled()  # answers that came are in the folder now; those of a declined request are kept
        return Outcome(ids, stored, report, figures, withheld=withheld)

    def _store_centroids(self, centroids: Centroids) -> FileRecord:
        return self.writer.put("centroids", lambda path: save_centroids(centroids, path))


def _ids(requests: _Requests) -> list[str]:
    return [request["id"] if isinstance(request, dict) else request for request in requests]


def _contact(report: Report) -> dict[str, Any]:
    """Who was asked, and what was sent."""
    return {
        "clients_contacted": sorted(report.clients_contacted),
        "clients_counting": sorted(set(report.clients_counting)),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "messages": report.traffic.messages,
        "releases": describe_releases(report.releases),
    }


def describe_releases(sent: Iterable[Release]) -> list[dict[str, Any]]:
    """Messages of clients as they stand in the journal, with what protected them: a guarantee, or none."""
    return [
        {
            "client": one.client,
            "what": one.what,
            "cells": one.cells,
            "bytes": one.size_bytes,
            "mechanism": one.mechanism,
            "sigma": one.sigma,
            "guarantee": asdict(one.guarantee) if one.guarantee else None,
            "name": one.name,
        }
        for one in sorted(sent, key=lambda release: release.client)
    ]


def _retained(figures: Figures | None, state: str) -> float | None:
    return figures[state]["validation"]["retain"] if figures else None
