"""How good a head is for those who stay, from the features that clients keep: no backbone runs again."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedup.federation import Federation, Part
from fedup.filters.closed_form import RetainedStatistics, Scores
from fedup.filters.ridge_head import RidgeHead
from fedup.models.backbone import HEAD
from fedup.request import Forget, union
from fedup.statistics.feature_cache import CachedReader
from fedup.statistics.integer_moments import IntegerMoments
from fedup.unlearning.class_recall import Recall
from fedup.unlearning.closed_form_fit import recall_between
from fedup.unlearning.exact_model import ExactModel

_ENOUGH_HELD_OUT = 30  # held-out rows of a class: from so many on, its recall is measured on them

_MEASURED: tuple[Part, ...] = ("train", "heldout")

Shares = dict[str, float | None]
_Answers = tuple[Tensor, Tensor]  # classes answered, and the rows that they are of


@dataclass(eq=False)
class HeadJudge:
    """Measures heads on the rows of clients in this process.

    Features of forgotten rows that were deleted are computed anew only where `anew` says so: they would be kept again.
    """

    federation: Federation
    anew: bool = False
    _readers: dict[int, CachedReader] = field(default_factory=dict, repr=False)

    def shares(self, model: ExactModel, requests: frozenset[Forget]) -> Shares:
        """Accuracies on what requests leave, and on what they name; None where there are no rows."""
        named, federation = union(requests), self.federation
        rows = {
            "validation, retained": federation.retained(named, "validation"),
            "held-out, retained": federation.retained(named, "heldout"),
            "held-out, forgotten": self._kept(model, federation.forgotten(named, "heldout")),
            "training, forgotten": self._kept(model, federation.forgotten(named, "train")),
        }
        return {name: self._share(model, own) for name, own in rows.items()}

    def answers(self, model: ExactModel, requests: frozenset[Forget]) -> dict[str, _Answers]:
        """Answers to retained rows, held-out and training ones."""
        named, answered = union(requests), dict[str, _Answers]()
        for part in _MEASURED:
            rows = self.federation.retained(named, part)
            answered[part] = self._answers(model, rows), rows
        return answered

    def recall(self, before: dict[str, _Answers], after: dict[str, _Answers]) -> dict[int, Recall]:
        """By class, on retained rows: held-out ones, or training rows where these are few."""
        recalls = {}
        for part in _MEASURED:
            (old, rows), (new, _) = before[part], after[part]
            labels = self.federation.y[rows]
            for label in labels.unique().tolist():
                own = labels == label
                if part == "train" or int(own.sum()) >= _ENOUGH_HELD_OUT:
                    before_share, after_share = (float((a[own] == label).double().mean()) for a in (old, new))
                    recalls[label] = Recall(before_share, after_share, int(own.sum()))
        return dict(sorted(recalls.items()))

    def _kept(self, model: ExactModel, rows: Tensor) -> Tensor:
        return rows if self.anew else rows[model.cache.holds(rows)]

    def _share(self, model: ExactModel, rows: Tensor) -> float | None:
        right = self._answers(model, rows) == self.federation.y[rows]
        return float(right.double().mean()) if len(rows) else None

    @torch.no_grad()
    def _answers(self, model: ExactModel, rows: Tensor) -> Tensor:
        if not len(rows):
            return rows
        reader = self._readers.get(id(model))
        if reader is None:
            reader = CachedReader(model.blank, HEAD, model.cache, model.config, model.base_fingerprint)
            self._readers = {id(model): reader}  # it hashes all inputs once
        return torch.cat([model.head(reader.read(self.federation.x, own).values).argmax(1) for own in rows.split(4096)])


def scores_of(head: RidgeHead) -> Scores:
    """A head's scores in double precision, on the CPU."""
    return Scores(head.weight.double().cpu(), head.bias.double().cpu())


def expected_recall(before: Scores, after: Scores, totals: IntegerMoments, model: ExactModel) -> dict[int, Recall]:
    """By class, from totals alone, where nobody's rows are here: of Gaussian features around the class means."""
    return recall_between(before, after, RetainedStatistics.of(totals, model.config))


def expected_accuracy(recalls: dict[int, Recall]) -> tuple[float, float] | None:
    """Of all rows, before and after."""
    rows = sum(recall.rows for recall in recalls.values())
    if not rows:
        return None
    before, after = (sum(getattr(own, side) * own.rows for own in recalls.values()) for side in ("before", "after"))
    return before / rows, after / rows
