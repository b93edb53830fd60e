"""A new base in place of the one that is served, in one event: trained on, or trained anew without what was forgotten.

Statistics and filters belong to one base. When training goes on, they are made anew before the event, and the requests
in force follow. A base that was trained without the requests needs none of them: they are finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fedup.clients.protocol import Contact
from fedup.errors import HarmError
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.models.views import fingerprint
from fedup.run.answer import contact_facts, describe_pending, describe_releases
from fedup.run.folder import Writer
from fedup.run.limits import Judge, Limits
from fedup.run.record import collection
from fedup.run.state import Request
from fedup.serving.filter_file import save_filter
from fedup.serving.model_file import save_model
from fedup.serving.plugged import PluggedModel
from fedup.statistics.store import Centroids
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import contact_of, purge, unlearn


def keep_retrained(
    writer: Writer,
    model: nn.Module,
    trained: Mapping[str, Any],
    compared: Mapping[str, Any],
    *,
    finished: Sequence[Request] | None = None,
) -> dict[str, Any]:
    """Put a model in place that was trained without all requests: these are finished, and filter and statistics are
    dropped with all that is sealed in them. Those `finished` are all that stand now, or the ones
    named. Returns the event's body."""
    state = writer.state
    ids = [request.id for request in (state.standing if finished is None else finished)]
    body = {
        "trained": {"model": _stored(writer, model), "fingerprint": fingerprint(model), **trained},
        "replaced": state.base,
        "requests": ids,
        "compared": compared,
        **dict.fromkeys(("collected", "centroids", "filter")),
    }
    writer.commit("retrained", body)
    return body


@dataclass
class Followed:
    """A new base that training went on to; `declined` says why it was not put in place."""

    report: Report
    body: Mapping[str, Any] = field(default_factory=dict)
    declined: str | None = None


@dataclass(frozen=True, eq=False)
class BaseDesk:
    """A run folder open for writing, with a new base and the statistics of clients that were collected from it."""

    writer: Writer
    plugged: PluggedModel
    store: Centroids | None
    clients: Federation | Contact | None = None
    judge: Judge | None = None
    config: FilterConfig | None = None  # of the filter in force
    finished: Sequence[Request] = ()  # that the new base was trained without
    compared: Mapping[str, Any] = field(default_factory=dict)  # with the one that is served, where some are finished

    def put_in_place(
        self, trained: Mapping[str, Any], collected: Mapping[str, Any], more_rounds: int, limits: Limits
    ) -> Followed:
        """Answer the requests in force and those that are open from the new base, and put all of it in place in one
        event; or note only why not. Statistics of forgotten rows are destroyed before anything is stored. The
        requests that are `finished` need no answer any more."""
        state, done = self.writer.state, {request.id for request in self.finished}
        answered = (*state.active, *state.open) if self.store is not None else ()
        following = [request for request in answered if request.id not in done]
        report, figures = Report(frozenset()), None
        if following:
            try:
                report = self._answer(following, limits)
            except HarmError as error:
                report = error.report or report
                return self._declined(following, report, str(error).partition(" Nothing was changed.")[0])
            lost = [own.id for own in following if own.is_active and own.forget in report.withheld]
            if lost:
                why = f"{', '.join(lost)} would lose the filter: it would make the model know these rows better"
                return self._declined(following, report, why)
            if self.judge and self.plugged.served:
                with report.stage("measure"):
                    figures = self.judge(self.plugged, report.requests)
            if self.plugged.served and (refusal := limits.refusal(figures)):
                return self._declined(following, report, refusal)
            if self.store is not None and (self.plugged.requests or self.store.open):
                purge(self.plugged, self.store)
        return Followed(report, self._commit(following, report, figures, trained, collected, more_rounds))

    def _answer(self, following: Sequence[Request], limits: Limits) -> Report:
        assert self.store is not None  # else nothing follows
        return unlearn(
            self.plugged,
            self.store,
            [request.forget for request in following],
            clients=contact_of(self.clients, self.plugged, self.store),
            config=self.config,
            force=limits.force,
            terms=limits.terms(self.judge, self.plugged),
        )

    def _declined(self, following: Sequence[Request], report: Report, why: str) -> Followed:
        event = {"requests": [], "declined": [request.id for request in following], "step": "continued", "why": why}
        facts = self._contact(report)
        self.writer.commit("declined", {**event, **facts, "time_s": dict(report.time_s)})
        return Followed(report, declined=why)

    def _contact(self, report: Report) -> dict[str, Any]:
        """What clients sent, for the statistics and for the answers."""
        facts = contact_facts(report)
        if self.store is not None:
            sent = self.store.traffic
            facts["releases"] = [*describe_releases(sent.releases), *facts["releases"]]
            facts |= {name: facts[name] + getattr(sent, name) for name in ("bytes_up", "bytes_down", "messages")}
        return facts

    def _commit(
        self,
        following: Sequence[Request],
        report: Report,
        figures: Mapping[str, Any] | None,
        trained: Mapping[str, Any],
        collected: Mapping[str, Any],
        more_rounds: int,
    ) -> dict[str, Any]:
        writer, served, model = self.writer, self.plugged.served, self.plugged.base
        stored = writer.put("filter", lambda path: save_filter(self.plugged, path)).to_json() if served else None
        of_store = collection(writer, self.store, collected) if self.store is not None else None
        entries = [self._entry(request, report) for request in following]
        body = {
            "more_rounds": more_rounds,
            "trained": {"model": _stored(writer, model), "fingerprint": self.plugged.base_fingerprint, **trained},
            "replaced": writer.state.base,
            "collected": of_store,
            "centroids": of_store and of_store["centroids"],
            "filter": stored,
            "config": served.settings if served else None,
            "requests": entries,
            "active": [entry["id"] for entry in entries if not entry["withheld"]],
            **({"finished": [own.id for own in self.finished], "compared": self.compared} if self.finished else {}),
            "base": self.plugged.base_fingerprint,
            "figures": figures,
            "centroids_used": report.centroids_used,
            "erasure": report.erasure,
            "delta": report.delta,
            "notes": list(report.notes),
            "pending": describe_pending(report),
            "forced": list(report.forced),
            "class_recall": {str(label): asdict(recall) for label, recall in report.class_recall.items()},
            "time_s": dict(report.time_s),
            "machine": trained.get("machine"),
            **self._contact(report),
        }
        writer.commit("continued", body)
        return body

    def _entry(self, request: Request, report: Report) -> dict[str, Any]:
        """A request as the event holds it, with the verdict for the new base."""
        verdict = report.verdicts.get(request.forget.digest)
        return {
            **request.entry,
            "verdict": verdict.to_json() if verdict else None,
            "withheld": request.forget in report.withheld,
            "notes": report.notes_about.get(request.forget.digest, []),
        }


def _stored(writer: Writer, model: nn.Module) -> dict[str, Any]:
    return writer.put("model", lambda path: save_model(model, path)).to_json()
