"""Counts of right answers to a client's own rows where the model learns labels or values."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedup.federation import named_rows
from fedup.models.cut import logits_of
from fedup.models.features import FEATURE_BATCH
from fedup.request import Forget
from fedup.statistics.client_data import ClientData
from fedup.statistics.proportions import Paired
from fedup.targets import hits, kind_of

if TYPE_CHECKING:
    from fedup.statistics.tally import RowsToCount

ALL_ROWS = 0  # the key of counts over all rows of a request


class TargetCounter:
    """Counts hits (`fedup.targets.hits`), which lie between 0 and 1, under two models at a time."""

    def __init__(self, data: ClientData, counted: "RowsToCount", *, most: int) -> None:
        self._data, self._most, self._forget_set = data, most, counted.forget_set
        self._deviations = torch.tensor(counted.deviations or [1.0] * data.num_classes, dtype=torch.float64)
        forgotten = counted.forget_set.class_ids
        self._outputs = [output for output in range(data.num_classes) if output not in forgotten]

    def by_output(self, before: nn.Module, after: nn.Module, rows: Tensor) -> dict[int, Paired]:
        """Of retained rows, by output: of a label k the rows with it under k, those without it under K + k."""
        rows = self._chosen(named_rows(self._data.client, self._rows_alone, rows, self._data.y)[1])
        first, second = self._hits(before, rows), self._hits(after, rows)
        y, number = self._data.y[rows], self._data.num_classes
        counts = {}
        for output in self._outputs:
            pairs = {output: torch.ones(len(rows), dtype=torch.bool, device=y.device)}
            if kind_of(y) == "labels":
                pairs = {output: y[:, output], number + output: ~y[:, output]}
            for key, own in pairs.items():
                if bool(own.any()):
                    counts[key] = _paired(first[own, output], second[own, output])
        return counts

    def of_rows(self, before: nn.Module, after: nn.Module, rows: Tensor) -> dict[int, Paired]:
        """Of some rows, the mean over all outputs that are not forgotten."""
        rows = self._chosen(rows)
        if not len(rows):
            return {}
        return {ALL_ROWS: _paired(*(self._hits(model, rows)[:, self._outputs].mean(1) for model in (before, after)))}

    def of_labels(self, before: nn.Module, after: nn.Module, rows: Tensor, request: Forget) -> dict[int, Paired]:
        """By label of the request, how often rows with the label are answered yes."""
        counts = {}
        for label in sorted(request.class_ids):
            own = self._chosen(rows[self._data.y[rows][:, label]])
            if len(own):
                counts[label] = _paired(*((self._said(model, own)[:, label] > 0).double() for model in (before, after)))
        return counts

    def named(self, request: Forget, rows: Tensor) -> Tensor:
        """The rows of the request's clients and samples."""
        return named_rows(self._data.client, replace(request, class_ids=frozenset()), rows, self._data.y)[0]

    @property
    def _rows_alone(self) -> Forget:
        """What leaves rows out: a forgotten label leaves none."""
        return replace(self._forget_set, class_ids=frozenset())

    def _chosen(self, rows: Tensor) -> Tensor:
        return self._data.some(rows, self._most)

    def _hits(self, model: nn.Module, rows: Tensor) -> Tensor:
        return hits(self._said(model, rows), self._data.y[rows], self._deviations)

    def _said(self, model: nn.Module, rows: Tensor) -> Tensor:
        """The model's outputs. (N, K)"""
        x = self._data.x
        said = [logits_of(model(x.index_select(0, batch))) for batch in rows.split(FEATURE_BATCH) if len(batch)]
        return torch.cat(said) if said else torch.zeros(0, self._data.num_classes, device=x.device)


def _paired(before: Tensor, after: Tensor) -> Paired:
    both = torch.minimum(before, after)
    return Paired(len(before), *(float(part.sum()) for part in (before, after, both)))
