"""The closed-form filter of a set of requests, and the recall to expect under it."""

from dataclasses import replace

import torch
from torch import Tensor

from fedup.errors import SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.closed_form import (
    DISCRIMINANT_SHARPNESS,
    SHARPNESS,
    ClosedForm,
    RetainedStatistics,
    Scores,
    blended,
    closed_form_filter,
    discriminant_scores,
    last_layer,
    ridge_scores,
    spread_matched,
    spread_on_means,
)
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel
from fedup.statistics.moment_store import MomentStore
from fedup.targets import Targets
from fedup.unlearning.class_biases import CountLosses, solved_biases
from fedup.unlearning.class_recall import LEAST_CLASS_ROWS, Recall

_DRAWN = 2048  # rows drawn of each class, to estimate its recall
BALANCED = 6  # the widening for ridge scores moved by biases
MOVED = 7  # that for the original's scores moved by biases: for a delta that costs a class too much
MOVED_BY_BIASES = (BALANCED, MOVED)
RIDGE_AIM = -2.0  # points of recall that classes may lose: ridge scores fit the counted rows, too, so less than none
MOVED_WORDS = "the scores are moved until clients count no such loss"
_BLENDS = {3: 0.5, 4: 0.25, 5: 0.0}  # by widening: the share of the closed form in a blend with the original's scores


def blends(forget_set: Forget) -> dict[int, str]:
    """The widenings that blend a closed form with the original's scores, in the order of trial, and their words.

    The original's scores alone, without the forgotten classes, answer if only classes are to be forgotten: no row of
    another class is answered worse then. They would forget no client and no sample.
    """
    alone = "the original's scores answer, without what is forgotten"
    words = {
        w: f"{share:.0%} of it, blended with the original's scores, answers" for w, share in _BLENDS.items() if share
    }
    only_classes = not (forget_set.client_ids or forget_set.sample_ids)
    return words | ({w: alone for w, share in _BLENDS.items() if not share} if only_classes else {})


def blend_share(widening: int) -> float:
    """The share of the closed form in the scores; all of it where nothing is blended."""
    return 0.0 if widening == MOVED else _BLENDS.get(widening, 1.0)


def check_closed_form(plugged: PluggedModel, config: FilterConfig, targets: Targets = "classes") -> None:
    """Raise where moments cannot answer: another filter was chosen, or the last layer cannot give chosen scores."""
    if config.filter in ("bottleneck", "both"):
        raise SettingError(
            f"filter={config.filter!r} is fitted to centroids, and this store holds moments: use filter='closed_form', "
            "or collect with statistics='centroids'."
        )
    if config.class_policy != "drop" and config.wants_bottleneck:
        raise SettingError("The closed form drops forgotten classes: leave class_policy at 'drop'.")
    if config.requires_eraser and targets != "classes":
        raise SettingError(
            f"An eraser compares rows of one class, and this model has {targets}: leave filter at 'auto'."
        )
    last_layer(plugged.base, plugged.cut, targets)


def retained_statistics(store: MomentStore, forget_set: Forget) -> RetainedStatistics:
    """What the store says of everything but these clients and classes."""
    return RetainedStatistics.of(store.retained(forget_set), store.config)


def kept_classes(store: MomentStore, forget_set: Forget, retained: RetainedStatistics) -> list[int]:
    """Classes that are kept as they were: clients have too few rows of them to report, or have yet to answer."""
    kept = {*store.classes_with_few(forget_set), *store.classes_waiting(forget_set)}
    return [c for c in sorted(kept) if int(retained.counts[c]) < LEAST_CLASS_ROWS]


def fit_closed_form(
    plugged: PluggedModel,
    store: MomentStore,
    forget_set: Forget,
    *,
    discriminant: bool = False,
    share: float = 1.0,
    biases: Tensor | None = None,
    retained: RetainedStatistics | None = None,
) -> ClosedForm:
    """A filter that gives scores fitted to what is retained: the same for a set of requests in any order.

    Ridge scores, or discriminants where those would cost a class too much; a `share` of them, and the original's scores
    for the rest. `biases` are added to the scores. A class of which clients have too few rows to report is answered
    where the original does; other classes without rows are never answered.
    """
    retained = retained_statistics(store, forget_set) if retained is None else retained
    head, absent = last_layer(plugged.base, plugged.cut), retained.counts == 0
    kept = torch.zeros_like(absent)
    kept[kept_classes(store, forget_set, retained)] = True
    scores = discriminant_scores(retained) if discriminant else ridge_scores(retained)
    sharpness = DISCRIMINANT_SHARPNESS if discriminant else SHARPNESS
    scores = blended(spread_matched(scores, head, retained, sharpness=sharpness), head, share)
    if biases is not None:
        scores = replace(scores, bias=scores.bias + biases)
    made = closed_form_filter(scores, head, store.config.bound, absent, kept)
    return made.to(next(plugged.base.parameters()).device)


def balancing_biases(
    plugged: PluggedModel,
    fitted: ClosedForm,
    retained: RetainedStatistics,
    count: CountLosses,
    *,
    aim: float,
    rounds: int,
) -> Tensor:
    """Biases for a filter's scores under which clients count no loss beyond the aim, as far as they are found.

    0 for classes that are kept as they were, or are absent.
    """
    scores = served_scores(fitted, last_layer(plugged.base, plugged.cut))
    spread, free = spread_on_means(scores, retained), retained.counts > 0
    if fitted.keeps:
        free = free & ~(fitted.kept.cpu() > 0)
    biases = solved_biases(
        lambda tried: count([torch.where(free, bias, 0.0) for bias in tried]),
        spread=spread,
        num_classes=len(retained.counts),
        aim=aim,
        rounds=rounds,
    )
    return torch.where(free, biases, 0.0)


@torch.no_grad()
def expected_recall(
    plugged: PluggedModel, retained: RetainedStatistics, fitted: ClosedForm | None
) -> dict[int, Recall]:
    """By class: the recall of the original and under the filter, on features drawn around the class means.

    Features of a class are taken to be Gaussian with the covariance that retained classes have within them. Only their
    scores are drawn, those of both models together; with a fixed seed.
    """
    head = last_layer(plugged.base, plugged.cut)
    if fitted is None:
        return recall_between(head, head, retained)
    kept = fitted.kept.cpu() > 0 if fitted.keeps else None
    return recall_between(head, served_scores(fitted, head), retained, kept=kept)


@torch.no_grad()
def recall_between(
    before: Scores, after: Scores, retained: RetainedStatistics, *, kept: Tensor | None = None
) -> dict[int, Recall]:
    """By class: the recall with two kinds of scores. Rows that the first answer by a class `kept` (a mask) keep it."""
    both = Scores(torch.cat([before.weight, after.weight]), torch.cat([before.bias, after.bias]))  # (2K, D)
    covariance = both.weight @ retained.within @ both.weight.T
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt()  # (2K, 2K)
    drawn = torch.randn(_DRAWN, len(root), dtype=torch.float64, generator=generator(0, "expected recall")) @ root.T
    recalls = {}
    for label in retained.counts.nonzero().flatten().tolist():
        scores = both.of(retained.means[label : label + 1]) + drawn  # (R, 2K)
        original, new = (part.argmax(1) for part in scores.chunk(2, dim=1))
        new = new if kept is None else torch.where(kept[original], original, new)  # these pass a filter unchanged
        right = [float((answers == label).double().mean()) for answers in (original, new)]
        recalls[label] = Recall(right[0], right[1], int(retained.counts[label]))
    return recalls


def served_scores(fitted: ClosedForm, head: Scores) -> Scores:
    """What the last layer gives behind the filter."""
    encoder, decoder, constant = (tensor.double().cpu() for tensor in (fitted.encoder, fitted.decoder, fitted.constant))
    written: Tensor = head.weight @ decoder  # (K, K)
    return Scores(written @ encoder, head.weight @ constant + head.bias)
