"""A plan carried out: a filter is built, checked for harm and measured, and only then served."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedup.errors import FedUPError
from fedup.filters.closed_form import ClosedForm
from fedup.filters.delta import Delta
from fedup.request import Forget, union
from fedup.serving.plugged import Served
from fedup.statistics.kept_eraser import EraserParts
from fedup.statistics.store import Centroids
from fedup.targets import MEASURE, OUTPUT
from fedup.unlearning.bottleneck_fit import cells_in_use
from fedup.unlearning.class_recall import (
    OF_ALL,
    Recall,
    check_all_classes,
    check_classes_left,
    check_recall,
    loss_of_all,
    lost_classes,
)
from fedup.unlearning.closed_form_fit import MOVED_BY_BIASES, MOVED_WORDS
from fedup.unlearning.eraser_builder import EraserBuilder
from fedup.unlearning.few_rows import shows_rows
from fedup.unlearning.fits import fit_of
from fedup.unlearning.measure import Counted, Measurement, UncheckedError
from fedup.unlearning.moment_refresh import refresh_of
from fedup.unlearning.outvoted import Outvoted
from fedup.unlearning.plan import RequestPlan
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report
from fedup.unlearning.verdict import Verdict, never_answered

_NOT_ALONE = "alone it has too few rows"
_CLOSE = 0.7  # share of the allowed loss: beyond it, wider bottlenecks are tried
_SCALES = 0.85, 0.7, 0.6, 0.5, 0.42, 0.35  # shares of a delta that are tried where all of it costs a class too much
FARTHER = (
    "The filter that can be made would make the model know these samples better than before, so it is withheld: the "
    "request stays open, and its rows are left out of all statistics and of later rounds. What helps is more "
    "training without them, or retraining; force=True serves the filter all the same."
)
UNCHANGED = (
    "The delta that can be made does not make these samples look unseen, so it is withheld: the request stays open, "
    "and its rows are left out of all statistics and of later rounds. What helps is more training without them, or "
    "retraining; force=True serves the delta all the same."
)


@dataclass(frozen=True)
class _Candidate:
    """A filter that may be served, and what it costs."""

    loss: float  # points that the worst class loses; under a delta also of all classes, as such a loss
    served: Served
    recalls: dict[int, Recall]
    centroids_used: int
    counted: Counted | None
    outvoted: Outvoted | None  # what one client alone counts in its classes
    words: str | None = None  # how gentle it is
    moved: int = 0  # the widening, if its scores were moved by biases


class Execution:
    """Answers the requests of a plan."""

    def __init__(self, plan: RequestPlan, report: Report) -> None:
        self._plan, self._report = plan, report
        self._fit = fit_of(plan)
        self._measurement = Measurement(plan, report, self._fit)
        self._eraser_parts: EraserParts = {}  # to be kept with the answer
        self._delta = plan.delta_builder(report)
        self._classes_lost = False  # a loss that force has allowed
        self._lost_waiting: Collection[int] = ()  # classes lost before, also those that only wait for a client
        self._known_lost: dict[int, int] | None = None  # classes lost before, where a refresh would hide that

    def answer(self) -> None:
        """Serve a filter for the plan's requests; a request that cannot be served is refused, or stays open."""
        plan, report, new = self._plan, self._report, self._plan.new
        active, before = plan.requests - new, plan.plugged.served
        store, several = plan.centroids, len(new) > 1 or bool(plan.again)
        original = store.to(store.device) if several and self._measurement.applies else None
        keep_sealed, asked = plan.terms.keep_sealed, union(new - plan.again)
        refresh = refresh_of(plan.centroids, plan.contact, report, keep_sealed=keep_sealed, new=asked)
        device = store.device.type
        # A fit needs gradients; autocast's cached casts would hide its steps.
        with refresh.undone_on_error(), torch.inference_mode(False), torch.autocast(device, enabled=False):
            candidate = self._build(active | new, refresh, checked_against=active | plan.again)
            while True:
                report.verdicts |= {
                    request.digest: self._verdict(request, candidate, active, new, original) for request in new
                }
                farther = frozenset(request for request in new if self._is_withheld(request))
                if not farther:
                    break
                report.withheld |= farther
                new -= farther
                if not new:
                    report.class_recall = {}  # it was that of a filter not served
                    break
                refresh.leave_open(farther)
                candidate = self._build(active | new, None)
            self._settle(active | new, candidate if new or not report.withheld else before)

    def _settle(self, requests: frozenset[Forget], candidate: Served | None) -> None:
        report, store, before = self._report, self._plan.centroids, self._plan.plugged.served
        with report.stage("swap"):
            if candidate is not None and candidate is not before:
                self._plan.plugged.serve(candidate)
        report.requests = requests
        report.erasure = candidate.erasure.about if candidate is not None and candidate.erasure is not None else None
        report.delta = candidate.delta.about if candidate is not None and candidate.delta is not None else None
        store.open = {request for request in store.open if request not in requests} | report.withheld
        store.pending = {**dict.fromkeys(report.pending, frozenset()), **store.pending}
        if candidate is not None and candidate is not before:
            store.eraser_parts = self._eraser_parts
        if report.withheld:
            for request in report.withheld:
                farther = report.verdicts[request.digest].finding == "farther than before"
                report.note(FARTHER if farther else UNCHANGED, [request])

    # --- candidates

    def _build(
        self, requests: frozenset[Forget], refresh: Refresh | None, checked_against: frozenset[Forget] | None = None
    ) -> Served:
        """A filter for these requests that harms no class, fitted to cells without the forgotten rows."""
        plan, report, store = self._plan, self._report, self._plan.centroids
        forget_set, left_out = union(requests), store.left_out(requests)
        if refresh is not None:
            used = cells_in_use(store, forget_set, plan.config)
            if checked_against is not None:
                self._lost_waiting = lost_classes(store, store.left_out(checked_against)).keys()
            with report.stage("contact"):
                refresh.wait_for_nobody()
                refresh.touched(used, left_out)  # asks for the classes of the samples
                if checked_against is not None and store.whole_cells_leave:
                    self._known_lost = lost_classes(store, store.left_out(checked_against))
                self._check_classes_left(left_out, checked_against)
                refresh.bring_up_to_date(used, left_out)
                self._check_classes_left(left_out, checked_against)  # purged cells are known now
        model, bound = plan.plugged, union(plan.new - plan.again).sample_ids.keys()
        delta = self._delta.delta_for(requests, left_out)
        eraser = EraserBuilder(
            model.base, model.cut, plan.eraser_config, plan.contact, report, store=store, bound=bound
        )
        candidates = self._candidates(requests, delta, eraser, left_out)
        chosen = min(candidates, key=lambda candidate: candidate.loss)
        if plan.force and chosen.loss > plan.terms.max_class_loss:
            chosen = candidates[0]
        elif self._costs_too_much(chosen) and self._delta.harms():
            return self._build(requests, None)
        report.class_recall, report.centroids_used = chosen.recalls, chosen.centroids_used
        self._measurement.counted, self._eraser_parts = chosen.counted, eraser.parts
        limits: Any = {"max_class_loss": plan.terms.max_class_loss, "targets": store.targets}
        if (outvoted := chosen.outvoted) is not None:
            limits["decisive"] = outvoted.decisive
            for note in outvoted.notes(store.targets):
                report.note(note)
        plan.allow(lambda: check_recall(chosen.recalls, forget_set, **limits), report)
        if outvoted is not None and chosen.served.delta is not None:
            counted = outvoted.tallies.values()
            plan.allow(lambda: check_all_classes(counted, plan.terms.max_class_loss), report)
        self._note_choice(candidates[0].served, chosen, forget_set)
        return chosen.served

    def _costs_too_much(self, chosen: _Candidate) -> bool:
        terms = self._plan.terms
        if chosen.loss > terms.max_class_loss:
            return True
        asked = terms.refusal if chosen.served.delta is not None and not self._plan.force else None
        return asked is not None and asked(chosen.served) is not None

    def _candidates(
        self, requests: frozenset[Forget], delta: Delta | None, eraser: EraserBuilder, left_out: Forget
    ) -> list[_Candidate]:
        """Filters of each kind in turn, until one costs no class much. If all come close to the allowed loss, the last
        kind again with wider bottlenecks: held-out rows may show a loss that centroids of memorised rows do not."""
        plan, served = self._plan, self._plan.plugged.served
        rest = frozenset(request for request in requests if delta is None or request.digest not in delta.requests)
        before = served.erasure if served else None
        erasure = eraser.erasure_for(rest, left_out, served.question if served else None, before)
        base, cut = plan.plugged.base_fingerprint, plan.plugged.cut
        unfitted = Served(None, requests, plan.config, base, cut, erasure, eraser.question, delta)
        try:
            return self._tried(unfitted, rest, complete=eraser.complete)
        except UncheckedError as error:
            kept = "the one served so far stays" if before else "there is none until then"
            for client, why in error.absent.items():
                self._report.wait_for(client, f"a new eraser has yet to be checked on its classes, {kept} ({why})")
            self._measurement.trusted = before
            return self._tried(replace(unfitted, erasure=before, question=None), rest, complete=False)

    def _tried(self, unfitted: Served, rest: frozenset[Forget], *, complete: bool) -> list[_Candidate]:
        """The candidates with this eraser, or none; `rest` are the requests that no delta answers."""
        plan, requests, delta, forget_set = self._plan, unfitted.requests, unfitted.delta, union(unfitted.requests)
        trials = self._fit.trials(forget_set, erased=unfitted.erasure is not None, complete=complete)
        if delta is not None and not rest and not forget_set.class_ids:
            trials = self._fit.trials_beside_delta()
        new, allowed = requests & plan.new, plan.terms.max_class_loss
        wider = self._fit.wider() if trials[-1][1] and self._measurement.applies else []
        candidates: list[_Candidate] = []
        for with_eraser, widening in [*trials, *((trials[-1][0], times) for times in wider)]:
            if widening > 1 and min(candidate.loss for candidate in candidates) <= _CLOSE * allowed:
                break
            if widening in MOVED_BY_BIASES and not self._measurement.counts_biases:
                continue
            trial = unfitted if with_eraser else replace(unfitted, erasure=None)
            candidates.append(self._fitted(trial, forget_set, new, widening))
            if candidates[-1].loss <= allowed / 2:
                break
        if trials[0][1] and not plan.force:
            candidates += self._gentler(unfitted if trials[0][0] else replace(unfitted, erasure=None), candidates)
        if delta is not None and not plan.force:
            self._weaken(delta, candidates, forget_set, new)
        return candidates

    def _fitted(self, trial: Served, forget_set: Forget, new: frozenset[Forget], widening: int) -> _Candidate:
        """The candidate with a filter at the cut; without one for widening 0."""
        self._report.centroids_used = 0
        moved = widening if widening in MOVED_BY_BIASES else 0
        with self._report.stage("fit"):
            if widening:
                count = self._measurement.losses_with if moved else None
                trial = self._fit.fitted(self._report, trial, forget_set, widening, count)
        return replace(self._candidate(trial, forget_set, new), words=MOVED_WORDS if moved else None, moved=moved)

    def _weaken(self, delta: Delta, candidates: list[_Candidate], forget_set: Forget, new: frozenset[Forget]) -> None:
        """Add candidates with less and less of the delta, until one costs no class more than allowed. Where scores were
        moved, they are moved anew for each share, if clients are near."""
        contact, allowed = self._plan.contact, self._plan.terms.max_class_loss
        moved = max(candidate.moved for candidate in candidates) if contact is not None and contact.near else 0
        plain = min((own for own in candidates if not own.moved), key=lambda candidate: candidate.loss).served
        for scale in _SCALES:
            if min(candidate.loss for candidate in candidates) <= allowed:
                break
            weaker = replace(plain, delta=replace(delta, scale=scale))
            candidates.append(self._candidate(weaker, forget_set, new))
            if moved and candidates[-1].loss > allowed and self._measurement.counts_biases:
                candidates.append(self._fitted(replace(weaker, filter=None), forget_set, new, moved))

    def _gentler(self, unfitted: Served, tried: list[_Candidate]) -> list[_Candidate]:
        """Closer and closer to the original, until a filter costs no class more than allowed."""
        plan, forget_set, gentler = self._plan, union(unfitted.requests), list[_Candidate]()
        for widening, words in self._fit.gentler(forget_set).items():
            if min(candidate.loss for candidate in (*tried, *gentler)) <= plan.terms.max_class_loss:
                break
            with self._report.stage("fit"):
                trial = self._fit.fitted(self._report, unfitted, forget_set, widening)
            gentler.append(replace(self._candidate(trial, forget_set, unfitted.requests & plan.new), words=words))
        return gentler

    def _candidate(self, trial: Served, forget_set: Forget, new: frozenset[Forget]) -> _Candidate:
        with self._report.stage("check"):
            recalls = self._measurement.recall(trial, forget_set, new)
        losses = [recall.loss for label, recall in recalls.items() if label not in forget_set.class_ids]
        measured, loss = self._measurement, max(losses, default=0.0)
        if trial.delta is not None and measured.outvoted is not None:
            loss = max(loss, OF_ALL * loss_of_all(measured.outvoted.tallies.values()))
        return _Candidate(loss, trial, recalls, self._report.centroids_used, measured.counted, measured.outvoted)

    # --- harm

    def _check_classes_left(self, left_out: Forget, active: frozenset[Forget] | None) -> None:
        """Refuse to lose a class that the active requests leave in place."""
        if active is not None and not self._classes_lost:
            store, forced = self._plan.centroids, len(self._report.forced)
            before = store.left_out(active)
            known, waiting = self._known_lost, self._lost_waiting
            self._plan.allow(lambda: check_classes_left(store, left_out, before, known, waiting), self._report)
            self._classes_lost = len(self._report.forced) > forced

    def _verdict(
        self,
        request: Forget,
        candidate: Served,
        active: frozenset[Forget],
        new: frozenset[Forget],
        original: Centroids | None,
    ) -> Verdict:
        classes = self._plan.centroids.targets == "classes"
        proved = classes and request.kind == "class" and isinstance(candidate.filter, ClosedForm)
        if not self._measurement.applies:
            verdict = self._measurement.no_verdict()
            return never_answered(verdict) if proved else verdict
        before = self._plan.plugged.served
        several = len(new) > 1 or request in self._plan.again
        if original is not None and several:  # compare with all requests but this one
            before = self._without_it(request, active | new, original)
        verdict = self._measurement.verdict(request, candidate, before, alone=not several)
        return never_answered(verdict) if proved else verdict

    def _without_it(self, request: Forget, requests: frozenset[Forget], original: Centroids) -> Served | None:
        """A filter for the other requests; the one before all new ones where that would show the rows of this one, or
        cannot be made."""
        if not request.names_rows_only:
            return self._without(request, requests, original)
        if not shows_rows(self._plan.centroids, request, union(requests - {request})):
            with suppress(FedUPError):
                return self._without(request, requests, original)
        self._report.note(f"To {request} is measured with all that were answered with it: {_NOT_ALONE}.", [request])
        return self._plan.plugged.served

    def _without(self, request: Forget, requests: frozenset[Forget], original: Centroids) -> Served:
        """A filter for the other requests from a copy of the original store; its report is thrown away."""
        terms = replace(self._plan.terms, trace=None)
        plan = replace(self._plan, centroids=original.to(original.device), force=True, terms=terms)
        aside = Execution(plan, Report(frozenset()))
        aside._delta = self._delta.aside(plan.centroids, aside._report)
        aside._measurement.silent = self._measurement.silent
        refresh = refresh_of(plan.centroids, plan.contact, aside._report, keep_sealed=False)
        return aside._build(requests - {request}, refresh)

    def _is_withheld(self, request: Forget) -> bool:
        finding = self._report.verdicts[request.digest].finding
        poor = finding == "farther than before" or (finding == "unchanged" and bool(self._delta.requests_of([request])))
        if not poor or not request.names_rows_only or request.reason != "withdrawal":
            return False
        if self._plan.force:
            self._report.forced.append(f"To {request} was answered although it makes the model know them better.")
            return False
        return True

    # --- notes

    def _note_choice(self, first: Served, candidate: _Candidate, forget_set: Forget) -> None:
        """Note why the filter is not the first choice, and what an eraser alone does not mend."""
        chosen = candidate.served
        if chosen.delta is not None and chosen.delta.scale < 1:
            moved = f", and {candidate.words}" if candidate.words else ""
            share = f"{chosen.delta.scale:.0%} of it answers"
            self._report.note(f"All of the delta would cost classes too much: {share}{moved}.")
        elif chosen is not first and (first.filter is not None or candidate.words):
            name, measure = OUTPUT[self._plan.centroids.targets], MEASURE[self._plan.centroids.targets]
            usual, instead = "The usual filter" if first.filter else "A delta alone", candidate.words
            self._report.note(f"{usual} would cost a {name} more of its {measure}: {instead or 'another one answers'}.")
        elif chosen is not first:
            instead = "A bottleneck besides it" if chosen.erasure is not None else "The bottleneck alone"
            self._report.note(f"An eraser alone would cost a class more of its recall. {instead} answers the request.")
        if chosen.erasure is not None and chosen.filter is None:
            self._note_broken_classes(forget_set)

    def _note_broken_classes(self, forget_set: Forget) -> None:
        """Note classes whose retained rows the original model rarely gets right: wrong labels of the samples may have
        done that, and an eraser does not mend it."""
        broken = [] if self._plan.config.requires_eraser else self._fit.broken_classes(forget_set)
        if broken:
            self._report.note(
                f"Class {', '.join(map(str, broken))}, as the forgotten samples were labelled, is recognised far less "
                "often than others: their labels may have broken it. A bottleneck besides the eraser (filter both) "
                "mends that."
            )
