"""A bottleneck that costs no class much: fitted again, more gently or wider, if a class would lose."""

import math
from collections.abc import Sequence
from dataclasses import replace

from fedup.filters.bottleneck import DEFAULT_RANK
from fedup.request import Forget
from fedup.serving.plugged import Served
from fedup.unlearning.bottleneck_fit import fit_bottleneck
from fedup.unlearning.class_recall import recall_at_cut
from fedup.unlearning.plan import RequestPlan
from fedup.unlearning.report import Report

_ALPHAS = (1.0, 1.0, 1.0, 0.3, 0.1)  # factor of alpha in each try of a fit
_GENTLEST = (0.1, 0.03)  # for withdrawn samples that nothing sets apart: all should stay as it is
_MORE_STEPS = 3  # times as many steps, so that features stay as they are
_WIDER = (2, 4)  # times the default rank, if a bottleneck costs a class too much on held-out rows


def fit_gently(plan: RequestPlan, report: Report, without: Served, forget_set: Forget, *, widening: int = 1) -> Served:
    """The served filter with a bottleneck of `widening` times the default rank.

    If a class would lose, the bottleneck is fitted again with that class drawn more often, then with less weight on
    labels and more on reconstruction. The fit that costs the worst class least is taken.
    """
    plugged, store = plan.plugged, plan.centroids
    emphasis: dict[int, float] = {}
    tries: list[tuple[float, Served]] = []
    rank = plan.config.rank if widening == 1 else _rank(plan, widening)
    for share in _alphas(plan, without, forget_set):
        longer, epochs = _MORE_STEPS if share < _ALPHAS[-1] + 1e-9 else 1, plan.config.epochs
        config = replace(
            plan.config,
            alpha=share * plan.config.alpha,
            steps=longer * plan.config.steps,
            epochs=None if epochs is None else longer * epochs,
            rank=rank,
        )
        fitted = fit_bottleneck(
            plugged, store, forget_set, config, erasure=without.erasure, emphasis=emphasis, trace=plan.terms.trace
        )
        report.centroids_used = fitted.centroids_used
        report.notes += [note for note in fitted.notes if note not in report.notes]
        served = replace(without, filter=fitted.filter)
        recalls = {} if store.dp else recall_at_cut(plugged, store, served, forget_set)
        worst = max((recall.loss for recall in recalls.values()), default=0.0)
        tries.append((worst, served))
        if worst <= plan.terms.max_class_loss / 2:
            break
        for label, recall in recalls.items():
            if recall.loss > plan.terms.max_class_loss / 4:
                emphasis[label] = 2 * emphasis.get(label, 1.0)
    return min(tries, key=lambda tried: tried[0])[1]


def widenings(plan: RequestPlan) -> list[int]:
    """The factors of the default rank that give wider bottlenecks; none if the rank was chosen."""
    if plan.config.rank is not None or not plan.config.gentle:
        return []
    ranks = {_rank(plan, times): times for times in reversed(_WIDER)}
    return sorted(times for rank, times in ranks.items() if rank > _rank(plan, 1))


def _rank(plan: RequestPlan, times: int) -> int:
    return min(times * DEFAULT_RANK, math.prod(plan.centroids.shape))


def _alphas(plan: RequestPlan, without: Served, forget_set: Forget) -> Sequence[float]:
    """The factor of alpha in each try."""
    if not plan.config.gentle:
        return (1.0,)
    withdrawn = forget_set.names_rows_only and forget_set.reason == "withdrawal" and plan.config.filter == "auto"
    return _GENTLEST if withdrawn and without.erasure is None else _ALPHAS
