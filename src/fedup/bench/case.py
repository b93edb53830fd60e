"""What metrics look at: an unlearned model beside the original and the retrained one."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fedup.bench.scenarios import Situation
from fedup.bench.task import Unlearned
from fedup.federation import Federation
from fedup.request import Forget
from fedup.tasks.datasets import Dataset
from fedup.tasks.evaluation import predict

if TYPE_CHECKING:
    from fedup.bench.shadow import Shadow
    from fedup.bench.shadow_federations import ShadowFederations

_NEAR = 0.01  # within one point of Retrain
Rows = Literal["heldout", "validation", "forgotten", "retained", "test", "triggered"]


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """Where models are measured: the federation's own rows, the official test set, and test rows with a trigger."""

    situation: Situation
    dataset: Dataset
    shadow: "Shadow | None" = None  # of an attacker, where an experiment has one
    shadow_federations: "ShadowFederations | None" = None  # the same: they calibrate the attack on single rows

    @property
    def federation(self) -> Federation:
        return self.situation.federation

    @property
    def request(self) -> Forget:
        return self.situation.request

    def ids(self, rows: Rows) -> Tensor:
        """Row numbers in the federation: held out or for validation, or trained on and to be forgotten or retained."""
        if rows == "forgotten":
            return self.federation.forgotten(self.request)
        if rows == "retained":
            return self.federation.retained(self.request)
        return self.federation.rows("validation" if rows == "validation" else "heldout")

    def inputs(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """An array, and which of its rows make up a set (None for all); empty without a trigger."""
        x, _, ids = self._arrays(rows)
        return x, ids

    def labels(self, rows: Rows) -> Tensor:
        """Labels of a set of rows. (N,)"""
        _, y, ids = self._arrays(rows)
        return y if ids is None else y[ids]

    def _arrays(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, labels, and which of them make up a set."""
        federation, dataset, triggered = self.federation, self.dataset, self.situation.triggered
        if rows == "triggered":
            return (triggered.x, triggered.y, None) if triggered else (dataset.test_x[:0], dataset.test_y[:0], None)
        if rows == "test":
            return dataset.test_x, dataset.test_y, None
        return federation.x, federation.y, self.ids(rows)

    def to_forget(self, rows: Rows) -> Tensor:
        """Which of these rows are to be forgotten; of test rows, those of forgotten classes. (N,)"""
        labels = self.labels(rows)
        if rows in ("test", "triggered"):
            return torch.isin(labels, torch.tensor(sorted(self.request.class_ids)).to(labels))
        if rows in ("heldout", "validation"):
            return torch.isin(self.ids(rows), self.federation.forgotten(self.request, rows))
        return torch.full_like(labels, rows == "forgotten", dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class Outputs:
    """A model's logits, computed in one pass over each set of rows and then kept for all metrics."""

    model: nn.Module
    data: EvaluationData
    _logits: dict[Rows, Tensor] = field(default_factory=dict)

    def logits(self, rows: Rows) -> Tensor:
        """Logits of all rows of a set. (N, K)"""
        if rows not in self._logits:
            self._logits[rows] = predict(self.model, *self.data.inputs(rows))
        return self._logits[rows]

    def probabilities(self, rows: Rows) -> Tensor:
        """Softmax outputs in double precision. (N, K)"""
        return self.logits(rows).double().softmax(1)

    def right(self, rows: Rows) -> Tensor:
        """Which rows are classified right. (N,)"""
        return self.logits(rows).argmax(1) == self.data.labels(rows)

    def accuracy(self, rows: Rows, *, forgotten: bool) -> float | None:
        """Share of the forgotten, or of the retained, rows classified right; None where there is no row."""
        mask = self.data.to_forget(rows)
        return share(self.right(rows)[mask if forgotten else ~mask])

    def moment(self) -> dict[str, float]:
        """R-A, and what unlearning lowers: a backdoor's success, else F-A (on training rows for sample requests)."""
        triggered = self.data.situation.triggered
        if triggered is not None:
            named = self.logits("triggered").argmax(1) == triggered.target
            unwanted: float | None = float(named[triggered.y != triggered.target].float().mean())
        else:
            rows: Rows = "heldout" if bool(self.data.to_forget("heldout").any()) else "forgotten"
            unwanted = self.accuracy(rows, forgotten=True)
        return {"r_a": self.accuracy("heldout", forgotten=False) or 0.0, "unwanted": unwanted or 0.0}


@dataclass(frozen=True, eq=False)
class Case:
    """One answer of one method, with what it is compared to."""

    unlearned: Unlearned
    now: Outputs
    original: Outputs
    retrained: Outputs

    @property
    def data(self) -> EvaluationData:
        return self.now.data

    def effect_s(self) -> float | None:
        """The paper's "Time": seconds until R-A ≥ Retrain − 1 point and F-A, or attack success, ≤ Retrain + 1 point;
        None if never. A model that is put in force at once, such as a filter, has its one moment at the end."""
        cost, goal = self.unlearned.cost, self.retrained.moment()
        for moment in [*cost.path, {"time_s": cost.total_time_s, **self.now.moment()}]:
            if moment["r_a"] >= goal["r_a"] - _NEAR and moment["unwanted"] <= goal["unwanted"] + _NEAR:
                return moment["time_s"]
        return None


def share(right: Tensor) -> float | None:
    """Share of true values; None for an empty tensor."""
    return float(right.double().mean()) if len(right) else None
