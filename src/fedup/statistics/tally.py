"""How models answer a client's own rows, in counts: what verdicts and the check of every class are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedup.federation import Client, named_rows
from fedup.models.cut import FEATURE_BATCH, logits_of
from fedup.request import Forget
from fedup.rng import generator
from fedup.statistics.proportions import Paired

MOST_ROWS = 2000  # of one kind at one client: more would not make a verdict any surer
MOST_CLASS_ROWS = 200  # retained rows of one class at one client
Counts = Mapping[int, Paired]  # by label


@dataclass(frozen=True)
class RowsToCount:
    """Which rows a client counts answers to: those of requests, and retained ones class by class.

    With `carried` a request's rows are said to be poisoned, and what matters is the label they carry: clients tell
    how often those labels are answered to their held-out rows, each with the share given here.
    """

    requests: Mapping[str, Forget]  # by name
    gone: Forget  # all that is forgotten: what stays is the rest
    carried: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    classes: bool = True  # whether retained rows are counted

    def to(self, client: int) -> "RowsToCount":
        """The part of it that a client needs to know."""
        return RowsToCount(
            {name: request.at(client) for name, request in self.requests.items()},
            self.gone.at(client),
            self.carried,
            self.classes,
        )

    def with_places(self, places: Callable[[Forget], Forget]) -> "RowsToCount":
        """The same with samples by their place among a node's rows."""
        requests = {name: places(request) for name, request in self.requests.items()}
        return replace(self, requests=requests, gone=places(self.gone))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "requests": {name: request.to_json() for name, request in self.requests.items()},
            "gone": self.gone.to_json(),
            "carried": {name: [[label, share] for label, share in of.items()] for name, of in self.carried.items()},
            "classes": self.classes,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RowsToCount":
        """The inverse of `to_json`."""
        return cls(
            {name: Forget.from_json(one) for name, one in told["requests"].items()},
            Forget.from_json(told["gone"]),
            {name: {int(label): float(share) for label, share in of} for name, of in told["carried"].items()},
            bool(told["classes"]),
        )


@dataclass(frozen=True)
class Tally:
    """One client's counts; a hit is an answer with the label that the row carries."""

    retained: Counts  # training rows that stay: original against the new filter
    held_out: Counts  # rows that stay and were never trained on, likewise
    forgotten: Mapping[str, Counts]  # rows of each request: what was served before against the new filter
    unseen: Mapping[str, Counts]  # what these are compared with; under label 0 alone where rows are poisoned

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "retained": _rows_of(self.retained),
            "held_out": _rows_of(self.held_out),
            "forgotten": {name: _rows_of(counts) for name, counts in self.forgotten.items()},
            "unseen": {name: _rows_of(counts) for name, counts in self.unseen.items()},
        }


@torch.no_grad()
def tally(
    original: nn.Module,
    before: nn.Module,
    after: nn.Module,
    x: Tensor,
    y: Tensor,
    client: Client,
    counted: RowsToCount,
) -> Tally:
    """A client's counts of hits under the model before and after a request was answered."""
    held_out = torch.cat([client.validation, client.heldout])
    classes: list[dict[int, Paired]] = []
    for part in (client.train, held_out):
        kept = named_rows(client, counted.gone, part, y)[1] if counted.classes else part[:0]
        rows = torch.cat([kept[:0], *(_some(own, MOST_CLASS_ROWS) for own in _by_label(kept, y))])
        classes.append(_count(original, after, x, y, rows))
    forgotten: dict[str, Counts] = {}
    unseen: dict[str, Counts] = {}
    for name, request in counted.requests.items():
        if request.class_ids and not request.client_ids and not request.sample_ids:
            rows = held_out[torch.isin(y[held_out], _tensor(request.class_ids, y))]
            forgotten[name] = _count(before, after, x, y, _some(rows, MOST_ROWS))
            continue
        rows = _some(_named(client, request, y), MOST_ROWS)
        if len(rows):
            forgotten[name] = _count(before, after, x, y, rows)
        if counted.carried.get(name):
            unseen[name] = {0: _carried(before, after, x, _some(held_out, MOST_ROWS), counted.carried[name])}
        elif len(rows):
            alike = held_out[torch.isin(y[held_out], y[rows].unique())]
            unseen[name] = _count(before, after, x, y, _some(alike, MOST_ROWS))
    return Tally(classes[0], classes[1], forgotten, unseen)


def _named(client: Client, request: Forget, y: Tensor) -> Tensor:
    """Training rows that a request names as a client's or as samples."""
    return named_rows(client, Forget(request.client_ids, frozenset(), request.sample_ids), client.train, y)[0]


def _count(before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> dict[int, Paired]:
    labels = y[rows]
    hits = [answers(model, x, rows) == labels for model in (before, after)]
    found = {}
    for label in labels.unique().tolist():
        one, other = (hit[labels == label] for hit in hits)
        found[label] = Paired(len(one), int(one.sum()), int(other.sum()), int((one & other).sum()))
    return found


def _carried(before: nn.Module, after: nn.Module, x: Tensor, rows: Tensor, shares: Mapping[int, float]) -> Paired:
    """How often labels are answered, each as much as it is carried by the rows in question."""
    one, other = (
        sum((share * (given == label).double() for label, share in shares.items()), torch.zeros(len(rows)).double())
        for given in (answers(model, x, rows).cpu() for model in (before, after))
    )
    return Paired(len(rows), float(one.sum()), float(other.sum()), float(torch.minimum(one, other).sum()))


def answers(model: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    """The classes that a model answers to rows. (N,)"""
    given = [logits_of(model(x.index_select(0, batch))).argmax(1) for batch in rows.split(FEATURE_BATCH) if len(batch)]
    return torch.cat(given) if given else rows[:0]


def _by_label(rows: Tensor, y: Tensor) -> list[Tensor]:
    return [rows[y[rows] == label] for label in y[rows].unique().tolist()]


def _some(rows: Tensor, most: int) -> Tensor:
    """All rows, or so many of them, always the same ones."""
    if len(rows) <= most:
        return rows
    return rows[torch.randperm(len(rows), generator=generator(0, "tally", len(rows)))[:most].to(rows.device)]


def _tensor(labels: frozenset[int], y: Tensor) -> Tensor:
    return torch.tensor(sorted(labels), dtype=y.dtype, device=y.device)


def _rows_of(counts: Counts) -> list[list[float]]:
    return [[label, one.rows, one.before, one.after, one.both] for label, one in sorted(counts.items())]
