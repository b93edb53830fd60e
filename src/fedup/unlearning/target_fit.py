"""The filter of a set of requests where the model learns labels or values, and what to expect of it."""

from dataclasses import dataclass, field, replace

import torch

from fedup.filters.closed_form import ClosedForm, Scores, blended, last_layer
from fedup.filters.target_form import (
    TargetStatistics,
    expected_labels,
    expected_values,
    label_scores,
    target_filter,
    target_scores,
)
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.integer_moments import IntegerMoments
from fedup.statistics.moment_store import MomentStore
from fedup.unlearning.class_recall import LEAST_CLASS_ROWS, Recall
from fedup.unlearning.closed_form_fit import blend_share, blends, served_scores
from fedup.unlearning.plan import RequestPlan
from fedup.unlearning.report import Report


def fit_targets(
    plugged: PluggedModel,
    store: MomentStore,
    forget_set: Forget,
    *,
    balanced: bool = False,
    share: float = 1.0,
    retained: TargetStatistics | None = None,
) -> ClosedForm:
    """A filter that gives what ridge regression on retained rows gives; forgotten labels never say yes.

    A `share` of that, and the original's answers for the rest. A label of which clients have too few rows to report
    stays as the original answers it.
    """
    retained = retained or TargetStatistics.of(store.retained(forget_set), store.config)
    head = last_layer(plugged.base, plugged.cut, store.targets)
    absent = torch.zeros(len(head.weight), dtype=torch.bool)
    if store.targets == "labels":
        scores = label_scores(retained, head, balanced=balanced)
        absent[sorted(forget_set.class_ids | store.finished.class_ids)] = True
        for label in kept_labels(store, forget_set, retained):
            scores.weight[label], scores.bias[label] = head.weight[label], head.bias[label]
    else:
        scores = target_scores(retained)
    scores = blended(scores, head, share)
    made = target_filter(scores, head, store.config.bound, absent)
    return made.to(next(plugged.base.parameters()).device)


def kept_labels(store: MomentStore, forget_set: Forget, retained: TargetStatistics) -> list[int]:
    """Labels that stay as they were: clients have too few rows with them to report."""
    rows = retained.target_mean * retained.rows
    return [label for label in store.classes_with_few(forget_set) if float(rows[label]) < LEAST_CLASS_ROWS]


@dataclass(frozen=True)
class TargetFit:
    """Closed forms for labels and values. For labels widening 2 takes a label to be as frequent as its absence; those
    from 3 on are blends with the original's answers."""

    plan: RequestPlan
    store: MomentStore
    sees_erasers = False
    _retained: dict[Forget, tuple[IntegerMoments, TargetStatistics]] = field(default_factory=dict)

    def trials(self, forget_set: Forget, *, erased: bool, complete: bool) -> list[tuple[bool, int]]:
        return [(False, 1), (False, 2)] if self.store.targets == "labels" else [(False, 1)]

    def trials_beside_delta(self) -> list[tuple[bool, int]]:
        return [(False, 0)]

    def wider(self) -> list[int]:
        return []

    def gentler(self, forget_set: Forget) -> dict[int, str]:
        return blends(forget_set)

    def fitted(
        self, report: Report, without: Served, forget_set: Forget, widening: int, count: object = None
    ) -> Served:
        retained = self.statistics(forget_set)
        for label in kept_labels(self.store, forget_set, retained) if self.store.targets == "labels" else ():
            report.note(f"Clients have too few rows with label {label} to report: it is kept as it was.")
        share = blend_share(widening)
        fitted = fit_targets(
            self.plan.plugged, self.store, forget_set, balanced=widening == 2, share=share, retained=retained
        )
        return replace(without, filter=fitted)

    def statistics(self, forget_set: Forget) -> TargetStatistics:
        """Of what is retained; made once for a state of the store, whose total is replaced and never written to."""
        known = self._retained.get(forget_set)
        if known is None or known[0] is not self.store.total:
            made = TargetStatistics.of(self.store.retained(forget_set), self.store.config)
            known = self._retained[forget_set] = self.store.total, made
        return known[1]

    def recall(self, candidate: Served, forget_set: Forget) -> dict[int, Recall]:
        """By output: balanced accuracy of labels for Gaussian scores, R² of values on the retained training rows."""
        assert isinstance(candidate.filter, ClosedForm)
        head = last_layer(self.plan.plugged.base, self.plan.plugged.cut, self.store.targets)
        retained = self.statistics(forget_set)
        before, after = (self._expected(retained, scores) for scores in (head, served_scores(candidate.filter, head)))
        rows = self.store.target_sums(self.store.retained(forget_set))
        finished = self.store.finished.class_ids
        return {label: Recall(before[label], after[label], rows[label]) for label in before if label not in finished}

    def _expected(self, retained: TargetStatistics, scores: Scores) -> dict[int, float]:
        if self.store.targets == "labels":
            return expected_labels(retained, scores)
        return dict(enumerate(expected_values(retained, scores)))

    def broken_classes(self, forget_set: Forget) -> list[int]:
        return []
