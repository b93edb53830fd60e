"""The two ways to a filter at the cut: a bottleneck fitted to centroids, or a closed form from moments."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fedup.filters.closed_form import ClosedForm, RetainedStatistics
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.request import Forget
from fedup.serving.plugged import Served
from fedup.statistics.integer_moments import IntegerMoments
from fedup.statistics.moment_store import MomentStore
from fedup.unlearning.bottleneck_fit import cells_in_use
from fedup.unlearning.class_recall import Recall, recall_at_cut
from fedup.unlearning.closed_form_fit import (
    BALANCED,
    MOVED,
    MOVED_BY_BIASES,
    RIDGE_AIM,
    balancing_biases,
    blend_share,
    blends,
    expected_recall,
    fit_closed_form,
    kept_classes,
    retained_statistics,
)
from fedup.unlearning.gentle_fit import fit_gently, widenings
from fedup.unlearning.plan import RequestPlan
from fedup.unlearning.report import Report
from fedup.unlearning.target_fit import TargetFit

_ROUNDS, _FEWER_ROUNDS = 8, 3  # of counting, to move scores: in one process, and where each message takes seconds
_BROKEN = 0.5  # share of the median recall: a class below it is broken
CountServed = Callable[[Served, Sequence[Tensor]], Tensor]  # losses of classes under a filter, with each of some biases
Trial = tuple[bool, int]  # with an eraser, and the widening of the bottleneck (0: none; closed forms: see there)


class Fit(Protocol):
    """Makes filters for a plan, and says what they cost as far as its store shows that."""

    sees_erasers: bool  # whether `recall` counts in what an eraser at the same cut does

    def trials(self, forget_set: Forget, *, erased: bool, complete: bool) -> list[Trial]:
        """In the order of trial; `complete` says that the eraser is for all samples of the requests."""

    def trials_beside_delta(self) -> list[Trial]:
        """In the order of trial, where a delta answers all requests and no class is forgotten."""

    def wider(self) -> list[int]:
        """The widenings to try if all trials come close to the allowed loss."""

    def gentler(self, forget_set: Forget) -> dict[int, str]:
        """The widenings to try in turn while all before cost a class too much, each with what it is in words."""

    def fitted(
        self, report: Report, without: Served, forget_set: Forget, widening: int, count: CountServed | None = None
    ) -> Served:
        """The served filter with one at the cut; some need what clients `count` under others."""

    def recall(self, candidate: Served, forget_set: Forget) -> dict[int, Recall]:
        """By class, the recall to expect on what is retained."""

    def broken_classes(self, forget_set: Forget) -> list[int]:
        """Classes of forgotten samples that the original model rarely gets right."""


@dataclass(frozen=True)
class BottleneckFit:
    """Bottlenecks from centroids."""

    plan: RequestPlan
    sees_erasers = True

    def trials(self, forget_set: Forget, *, erased: bool, complete: bool) -> list[Trial]:
        """By default samples get an eraser, with a bottleneck if the requests name more or the eraser alone harms a
        class, and the bottleneck alone if the eraser harms and the samples are merely withdrawn
        (docs/cuts_and_erasure.md)."""
        config = self.plan.config
        if config.requires_eraser or not erased:
            return [(erased, int(config.wants_bottleneck))]
        both = [(True, 1)]
        trials = both if not complete or forget_set.client_ids or forget_set.class_ids else [(True, 0), *both]
        return trials if forget_set.reason == "poison" or self.plan.force else [*trials, (False, 1)]

    def trials_beside_delta(self) -> list[Trial]:
        return [(False, 0)]

    def wider(self) -> list[int]:
        return widenings(self.plan)

    def gentler(self, forget_set: Forget) -> dict[int, str]:
        return {}

    def fitted(
        self, report: Report, without: Served, forget_set: Forget, widening: int, count: CountServed | None = None
    ) -> Served:
        return fit_gently(self.plan, report, without, forget_set, widening=widening)

    def recall(self, candidate: Served, forget_set: Forget) -> dict[int, Recall]:
        return recall_at_cut(self.plan.plugged, self.plan.centroids, candidate, forget_set)

    @torch.no_grad()
    def broken_classes(self, forget_set: Forget) -> list[int]:
        plan, store = self.plan, self.plan.centroids
        if store.dp is not None:
            return []
        known = store.sample_labels
        named = {known[c][i] for c, ids in forget_set.sample_ids.items() for i in ids & known.get(c, {}).keys()}
        rows = store.rows_of(cells_in_use(store, forget_set, plan.config))
        labels = store.row_labels()[rows]
        tail = flat_tail(shared_view(plan.plugged.base, frozen=True), plan.plugged.cut, store.shape)
        right = torch.cat([tail(store.vectors[part]).argmax(1) for part in rows.split(1024)]) == labels
        recalls = {label: float(right[labels == label].float().mean()) for label in labels.unique().tolist()}
        usual = statistics.median(recalls.values())
        return sorted(label for label in named if recalls.get(label, usual) < _BROKEN * usual)


@dataclass(frozen=True)
class ClosedFormFit:
    """Closed forms from moments: widening 1 is for ridge scores, 2 for discriminants, BALANCED for ridge scores that
    are moved, MOVED for the original's that are, those between for ridge scores blended with the original's."""

    plan: RequestPlan
    store: MomentStore
    sees_erasers = False
    _retained: dict[Forget, tuple[IntegerMoments, RetainedStatistics]] = field(default_factory=dict)

    def trials(self, forget_set: Forget, *, erased: bool, complete: bool) -> list[Trial]:
        """Closed forms cost nothing, so they are tried before an eraser alone."""
        if not self.plan.config.wants_bottleneck:
            return [(erased, 0)]
        trials = [(erased, 1), (erased, 2), (erased, BALANCED)]
        if erased and not self.plan.config.requires_eraser:
            trials.append((True, 0))
            if forget_set.reason != "poison" and not self.plan.force:
                trials += [(False, 1), (False, 2), (False, BALANCED)]
        return trials

    def trials_beside_delta(self) -> list[Trial]:
        return [(False, 0), (False, MOVED)]

    def wider(self) -> list[int]:
        return []

    def gentler(self, forget_set: Forget) -> dict[int, str]:
        return blends(forget_set)

    def fitted(
        self, report: Report, without: Served, forget_set: Forget, widening: int, count: CountServed | None = None
    ) -> Served:
        plugged, store, retained = self.plan.plugged, self.store, self._statistics(forget_set)
        if kept := kept_classes(store, forget_set, retained):
            listed, end = (
                ", ".join(map(str, kept)),
                "it is kept as it was" if len(kept) == 1 else "they are kept as they were",
            )
            why = "have yet to answer, or have too few rows" if store.clients_out else "have too few rows"
            report.note(f"Clients {why} of class {listed} to report: {end}.")
        fit = partial(fit_closed_form, plugged, store, forget_set, share=blend_share(widening), retained=retained)
        fitted = fit(discriminant=widening == 2)
        if widening in MOVED_BY_BIASES and count is not None:
            losses = partial(count, replace(without, filter=fitted))
            rounds = _ROUNDS if self.plan.contact is not None and self.plan.contact.near else _FEWER_ROUNDS
            aim = RIDGE_AIM if widening == BALANCED else self.plan.terms.max_class_loss / 2
            biases = balancing_biases(plugged, fitted, retained, losses, aim=aim, rounds=rounds)
            fitted = fit(biases=biases)
        return replace(without, filter=fitted)

    def _statistics(self, forget_set: Forget) -> RetainedStatistics:
        """Made once for a state of the store, whose total is replaced and never written to."""
        known = self._retained.get(forget_set)
        if known is None or known[0] is not self.store.total:
            known = self._retained[forget_set] = self.store.total, retained_statistics(self.store, forget_set)
        return known[1]

    def recall(self, candidate: Served, forget_set: Forget) -> dict[int, Recall]:
        assert candidate.filter is None or isinstance(candidate.filter, ClosedForm)
        return expected_recall(self.plan.plugged, self._statistics(forget_set), candidate.filter)

    def broken_classes(self, forget_set: Forget) -> list[int]:
        return []


def fit_of(plan: RequestPlan) -> Fit:
    """The way that the plan's store allows."""
    store = plan.centroids
    if isinstance(store, MomentStore):
        return ClosedFormFit(plan, store) if store.targets == "classes" else TargetFit(plan, store)
    return BottleneckFit(plan)
