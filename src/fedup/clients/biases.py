"""Counts of right answers to a client's rows, under one filter with several biases of its scores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.clients.tally import filter_from, filter_to_message
from fedup.errors import DataError
from fedup.models.cut import logits_of
from fedup.models.features import FEATURE_BATCH
from fedup.serving.plugged import Served, filtered_view
from fedup.statistics.proportions import Paired
from fedup.statistics.tally import LARGEST_COUNT, MOST_CLASS_ROWS, RowsToCount, Tally, counted_by_class
from fedup.targets import kind_of

MOST_BIASES = 16  # in one question
Hits = Mapping[int, tuple[int, ...]]  # by class: its rows, hits of the original, and hits with each of the biases


@dataclass(frozen=True)
class HitsByBias:
    """One client's counts; a hit is an answer with the label of the row."""

    retained: Hits  # training rows that are retained
    held_out: Hits  # rows that were never trained on

    def tally(self, place: int) -> Tally:
        """The counts with one of the biases."""
        return Tally(_paired(self.retained, place), _paired(self.held_out, place), {}, {})


def _paired(hits: Hits, place: int) -> dict[int, Paired]:
    """Hits before and with one of the biases; of hits both times is only known how many they are at most."""
    after = {label: counts[2 + place] for label, counts in hits.items()}
    return {
        label: Paired(rows, before, after[label], min(before, after[label])).at_most(MOST_CLASS_ROWS)
        for label, (rows, before, *_) in hits.items()
    }


@dataclass(frozen=True)
class BiasesQuestion(ExactQuestion[HitsByBias]):
    """How often the classes of a client's rows are answered if numbers are added to the scores behind a filter."""

    kind: ClassVar[str] = "biases"
    reported_as: ClassVar[str] = "counts of answers"
    reads_held_out: ClassVar[bool] = True

    served: Served | None  # None: the original
    rows: RowsToCount
    biases: tuple[tuple[float, ...], ...]  # (V, K)
    trained_on: bool = True  # whether retained training rows are counted, too

    def to_message(self) -> Message:
        header, arrays = filter_to_message("filter", self.served)
        biases = [list(own) for own in self.biases]
        own = {"question": self.rows.to_json(), "biases": biases, "trained_on": self.trained_on}
        return {**own, "filter": header}, arrays

    @classmethod
    def from_message(cls, details: Details, arrays: Arrays) -> Self:
        served = filter_from("filter", details["filter"], arrays)
        biases = tuple(tuple(map(float, own)) for own in details["biases"])
        if not 0 < len(biases) <= MOST_BIASES:
            raise DataError(f"1 to {MOST_BIASES} biases of one filter can be compared; found {len(biases)}.")
        if not all(math.isfinite(number) for own in biases for number in own):
            raise DataError("Biases must be finite numbers.")
        return cls(served, RowsToCount.from_json(details["question"]), biases, bool(details["trained_on"]))

    def check_model(self, base: str) -> None:
        if self.served is not None and self.served.base != base:
            raise DataError("A filter came that was made for another model.")

    def check_classes(self, num_classes: int) -> None:
        if any(len(own) != num_classes for own in self.biases):
            raise DataError(f"A bias for each of {num_classes} classes is needed.")

    def answer(self, data: ClientData) -> HitsByBias:
        retained, held_out = self.counted(data)
        original, filtered = (filtered_view(data.model, served) for served in (None, self.served))
        return HitsByBias(*(self._hits(data, rows, original, filtered) for rows in (retained, held_out)))

    def counted(self, data: ClientData) -> tuple[Tensor, Tensor]:
        """The rows that are counted: trained on, and held out."""
        if kind_of(data.y) != "classes":
            raise DataError("Scores are moved by biases where each row has one class.")
        retained, held_out = counted_by_class(data, self.rows)
        return retained if self.trained_on else retained[:0], held_out

    @torch.no_grad()
    def _hits(self, data: ClientData, rows: Tensor, original: nn.Module, filtered: nn.Module) -> Hits:
        biases = torch.tensor(self.biases, dtype=torch.float64, device=data.x.device)  # (V, K)
        hits = [torch.empty(0, 1 + len(biases), dtype=torch.bool, device=data.x.device)]
        for batch in rows.split(FEATURE_BATCH) if len(rows) else ():
            inputs, labels = data.x.index_select(0, batch), data.y[batch]
            before = logits_of(original(inputs)).argmax(1) == labels  # (B,)
            scores = logits_of(filtered(inputs)).double()  # (B, K)
            hits.append(torch.stack([before, *((scores + bias).argmax(1) == labels for bias in biases)], dim=1))
        right, labels = torch.cat(hits), data.y[rows]
        groups = {label: right[labels == label] for label in labels.unique().tolist()}
        return {label: (len(own), *own.sum(0).tolist()) for label, own in groups.items() if len(own) >= data.least_rows}

    def answer_message(self, answer: HitsByBias) -> Message:
        parts = {"retained": answer.retained, "held_out": answer.held_out}
        return {name: [[label, *counts] for label, counts in sorted(part.items())] for name, part in parts.items()}, {}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> HitsByBias:
        """There are no more hits than rows."""
        return HitsByBias(*(self._read_hits(details.get(name), facts.num_classes) for name in ("retained", "held_out")))

    def _read_hits(self, reported: object, num_classes: int) -> Hits:
        require(isinstance(reported, list), "its counts are no list")
        hits: dict[int, tuple[int, ...]] = {}
        assert isinstance(reported, list)
        for row in reported:
            whole = isinstance(row, list) and all(type(number) is int for number in row)
            require(whole and len(row) == 3 + len(self.biases), "a count is no row of whole numbers")
            label, rows, *found = row
            require(0 <= label < num_classes and label not in hits, "a label is out of range, or comes twice")
            require(0 < rows <= LARGEST_COUNT, "counts do not add up")
            require(all(0 <= number <= rows for number in found), "there are more hits than rows")
            hits[label] = rows, *found
        return hits
