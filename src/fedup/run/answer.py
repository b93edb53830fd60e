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
from fedup.statistics.store import CellName, Centroids, save_centroids
from fedup.statistics.traffic import Release
from fedup.unlearning.plan import Terms
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import purge as purge_cells
from fedup.unlearning.unlearn import restore as take_back
from fedup.unlearning.unlearn import unlearn as fit_and_serve

_LONGEST_REFERENCE = 200

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


def unlearn(
    writer: Writer,
    plugged: PluggedModel,
    centroids: Centroids,
    asked: Sequence[NewRequest],
    *,
    clients: Federation | Contact | None = None,
    config: FilterConfig | None = None,
    keep_sealed: bool = False,
    judge: Judge | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    facts: Mapping[str, Any] | None = None,
) -> Outcome:
    """Fit a filter for the requests in force and these, and put it in force unless it costs too much.

    `facts` go into the event as they are. After an answer was declined, load model and centroids anew.
    """
    waiting = {request.forget: request for request in writer.state.open}
    ids: dict[Forget, str] = {forget: request.id for forget, request in waiting.items()}
    for one in asked:
        ids.setdefault(one.forget, writer.state.next_id(len(ids) - len(waiting)))
    requests: list[dict[str, Any]] = [
        {
            "id": ids[one.forget],
            "reference": one.reference or (waiting[one.forget].reference if one.forget in waiting else None),
            "kind": one.forget.kind,
            "forget": one.forget.to_json(),
            "digest": one.forget.digest,
            "rows": dict(one.rows),
        }
        for one in asked
    ]
    body: dict[str, Any] = {**(facts or {}), "requests": requests}
    try:
        report = fit_and_serve(
            plugged,
            centroids,
            [one.forget for one in asked],
            clients=clients,
            config=config,
            force=limits.force,
            terms=Terms(limits.max_class_loss, keep_sealed=keep_sealed),
        )
    except HarmError as error:
        return _refused(writer, "unlearned", body, plugged, error)
    for noted, one in zip(requests, asked, strict=True):
        verdict = report.verdicts.get(one.forget.digest)
        noted |= {"verdict": verdict.to_json() if verdict else None, "withheld": one.forget in report.withheld}
        noted["notes"] = report.notes_about.get(one.forget.digest, [])
    answer = _settle(writer, "unlearned", body, plugged, centroids, report, judge, limits)
    _let_answers_go(clients, answer)
    return answer


def _refused(writer: Writer, kind: str, body: Mapping[str, Any], plugged: PluggedModel, error: HarmError) -> Outcome:
    """An answer that would harm those who did not ask: noted with what clients told; nothing else has changed."""
    ids = [one["id"] if isinstance(one, dict) else one for one in body["requests"]]
    report = error.report or Report(plugged.requests)
    declined = {**body, "requests": [], "declined": body["requests"], "step": kind, "why": str(error)}
    declined |= {"classes": error.classes, "time_s": dict(report.time_s), **_contact(report)}
    writer.commit("declined", declined)
    return Outcome(ids, writer.state.filter, report, None, declined=str(error))


def restore(
    writer: Writer,
    plugged: PluggedModel,
    centroids: Centroids | None,
    requests: Sequence[Request],
    *,
    clients: Federation | Contact | None = None,
    judge: Judge | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    facts: Mapping[str, Any] | None = None,
) -> Outcome:
    """Take requests back: a filter for the remaining ones, or none after the last."""
    body = {**(facts or {}), "requests": [request.id for request in requests]}
    try:
        report = take_back(
            plugged,
            centroids,
            [request.forget for request in requests],
            clients=clients,
            force=limits.force,
            terms=Terms(limits.max_class_loss),
        )
    except HarmError as error:
        return _refused(writer, "restored", body, plugged, error)
    answer = _settle(writer, "restored", body, plugged, centroids, report, judge, limits)
    _let_answers_go(clients, answer)
    return answer


def purge(writer: Writer, plugged: PluggedModel, centroids: Centroids) -> list[CellName]:
    """Destroy the sealed cells: from then on they are in no file of the folder."""
    gone = purge_cells(plugged, centroids)
    record = writer.put("centroids", lambda path: save_centroids(centroids, path))
    writer.commit("purged", {"cells": [list(cell) for cell in gone], "centroids": record.to_json()})
    return gone


def _let_answers_go(clients: Federation | Contact | None, answer: Outcome) -> None:
    """Answers that came are in the folder now. Those of a request that was declined stay: it may be asked again, with
    force, and need not cost twice."""
    if clients is not None and not isinstance(clients, Federation) and answer.declined is None:
        clients.settled()


def _settle(
    writer: Writer,
    kind: str,
    body: dict[str, Any],
    plugged: PluggedModel,
    centroids: Centroids | None,
    report: Report,
    judge: Judge | None,
    limits: Limits,
) -> Outcome:
    """Measure what was fitted, store it and commit; or only note that it was declined."""
    ids = [r["id"] if isinstance(r, dict) else r for r in body["requests"]]
    withheld = [r["id"] for r in body["requests"] if isinstance(r, dict) and r["withheld"]]
    served = plugged.served
    swapped = kind == "restored" or len(withheld) < len(ids)  # else what was served before still is
    with report.stage("measure"):
        figures = judge(plugged, report.requests) if judge and served and swapped else None
    body |= {
        "figures": figures,
        **_contact(report),
        "centroids_used": report.centroids_used,
        "erasure": report.erasure,
        "notes": list(report.notes),
        "forced": list(report.forced),
        "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
        "base": plugged.base_fingerprint,
    }
    refusal = limits.refusal(figures) if served and swapped else None
    if refusal:
        declined = {**body, "requests": [], "declined": body["requests"], "step": kind, "why": refusal}
        writer.commit("declined", declined | {"time_s": dict(report.time_s)})
        return Outcome(ids, writer.state.filter, report, figures, declined=refusal)
    stored: FileRecord | None = None
    changed: FileRecord | None = None
    with report.stage("store"):
        if served and swapped:
            stored = writer.put("filter", lambda path: save_filter(plugged, path))
        elif served:
            stored = writer.state.filter
        reopened = withheld or any(request.id in ids for request in writer.state.open)
        if centroids is not None and (report.cells_replaced or report.clients_contacted or reopened):
            changed = writer.put("centroids", lambda path: save_centroids(centroids, path))
    body |= {
        "active": [request.id for request in writer.state.active if request.id not in ids],
        "filter": stored.to_json() if stored else None,
        "config": served.settings if served else None,
        "centroids": changed.to_json() if changed else None,
        "time_s": dict(report.time_s),
    }
    if kind == "unlearned":
        body["active"] += [name for name in ids if name not in withheld]
    writer.commit(kind, body)
    return Outcome(ids, stored, report, figures, withheld=withheld)


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
