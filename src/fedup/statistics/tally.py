"""Counts of right answers to a client's own rows, for verdicts and for the check of every class."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedup.federation import named_rows
from fedup.models.cut import logits_of
from fedup.models.features import FEATURE_BATCH
from fedup.request import Forget
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups, Weights, read_weights, write_weights
from fedup.statistics.proportions import Paired
from fedup.statistics.target_tally import TargetCounter
from fedup.targets import kind_of

MOST_ROWS = 2000  # of one kind at one client: more would hardly improve a verdict, and weigh no more in it
MOST_CLASS_ROWS = 200  # retained rows of one class at one client, likewise
LARGEST_COUNT = 2**53  # that every number holds exactly
Counts = Mapping[int, Paired]  # by label


@dataclass(frozen=True)
class RowsToCount(RowGroups):
    """The rows that a client counts answers to: those of requests, and retained ones by class.

    `carried` has the labels of poisoned requests and their shares: clients count how often these labels are answered to
    their held-out rows.
    """

    carried: Weights = field(default_factory=dict)
    classes: bool = True  # whether retained rows are counted
    deviations: tuple[float, ...] = ()  # of values: the unit of their errors

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = {"carried": write_weights(self.carried), "classes": self.classes, "deviations": list(self.deviations)}
        return {**super().to_json(), **own}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        groups = super().from_json(plain)
        carried, deviations = read_weights(plain["carried"]), tuple(map(float, plain.get("deviations", ())))
        return replace(groups, carried=carried, classes=bool(plain["classes"]), deviations=deviations)


@dataclass(frozen=True)
class Tally:
    """One client's counts; a hit is an answer with the label of the row."""

    retained: Counts  # retained training rows: the original and the new filter
    held_out: Counts  # retained rows that were never trained on, likewise
    forgotten: Mapping[str, Counts]  # rows of each request: the filter before and the new one
    unseen: Mapping[str, Counts]  # rows to compare these with; all under label 0 for poisoned ones

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        groups = {"forgotten": self.forgotten, "unseen": self.unseen}
        by_request = {key: {name: _rows_of(own) for name, own in of.items()} for key, of in groups.items()}
        return {"retained": _rows_of(self.retained), "held_out": _rows_of(self.held_out), **by_request}


def added_counts(counted: Iterable[Counts]) -> dict[int, Paired]:
    """By label, the counts of several clients together."""
    added: defaultdict[int, Paired] = defaultdict(Paired)
    for label, counts in chain.from_iterable(counts.items() for counts in counted):
        added[label] += counts
    return added


def rows_counted(data: ClientData, counted: RowsToCount) -> Iterator[tuple[bool, Tensor]]:
    """The groups of rows that `tally` counts answers to, and whether it counts by label."""
    data = data.without(counted.finished)
    y, client = data.y, data.client
    held_out = torch.cat([client.validation, client.heldout])
    if kind_of(y) != "classes":
        gone = counted.forget_set
        apart = Forget(gone.client_ids, frozenset(), gone.sample_ids)
        yield from ((True, named_rows(client, apart, part, y)[1]) for part in (client.train, held_out))
        yield from ((True, _request_rows(data, request)) for request in counted.requests.values())
        return
    yield from ((True, rows) for rows in counted_by_class(data, counted) if counted.classes)
    for name, request in counted.requests.items():
        if request.class_ids and not request.client_ids and not request.sample_ids:
            yield True, data.some(named_rows(client, request, held_out, y)[0], MOST_ROWS)
            continue
        rows = _request_rows(data, request)
        yield True, rows
        if counted.carried.get(name):
            yield False, data.some(held_out, MOST_ROWS)
        elif len(rows):
            yield True, _alike(held_out, rows, data)


def counted_by_class(data: ClientData, counted: RowsToCount) -> tuple[Tensor, Tensor]:
    """Some retained rows of each class: those that the client trained on, and those that it did not."""
    data = data.without(counted.finished)
    y, client = data.y, data.client
    parts = client.train, torch.cat([client.validation, client.heldout])
    kept = [named_rows(client, counted.forget_set, part, y)[1] if counted.classes else part[:0] for part in parts]
    return _class_rows(kept[0], data), _class_rows(kept[1], data)


@torch.no_grad()
def tally(data: ClientData, counted: RowsToCount, *, original: nn.Module, before: nn.Module, after: nn.Module) -> Tally:
    """A client's counts of hits before and after a request."""
    if kind_of(data.y) != "classes":
        return _target_tally(data, counted, original=original, before=before, after=after)
    classes = [_count(original, after, data.x, data.y, rows) for rows in counted_by_class(data, counted)]
    data = data.without(counted.finished)
    x, y, client = data.x, data.y, data.client
    held_out = torch.cat([client.validation, client.heldout])
    forgotten: dict[str, Counts] = {}
    unseen: dict[str, Counts] = {}
    for name, request in counted.requests.items():
        if request.class_ids and not request.client_ids and not request.sample_ids:
            rows = data.some(named_rows(client, request, held_out, y)[0], MOST_ROWS)
            forgotten[name] = _count(before, after, x, y, rows)
            continue
        rows = _request_rows(data, request)
        if len(rows):
            forgotten[name] = _count(before, after, x, y, rows)
        if counted.carried.get(name):
            unseen[name] = {0: _carried(before, after, x, data.some(held_out, MOST_ROWS), counted.carried[name])}
        elif len(rows):
            unseen[name] = _count(before, after, x, y, _alike(held_out, rows, data))
    return Tally(classes[0], classes[1], forgotten, unseen)


def _target_tally(
    data: ClientData, counted: RowsToCount, *, original: nn.Module, before: nn.Module, after: nn.Module
) -> Tally:
    """The same for labels and values. Rows of a request are compared with all held-out rows of their client."""
    counter, client = TargetCounter(data, counted, most=MOST_ROWS), data.client
    held_out = torch.cat([client.validation, client.heldout])
    classes = [
        counter.by_output(original, after, part if counted.classes else part[:0]) for part in (client.train, held_out)
    ]
    forgotten: dict[str, Counts] = {}
    unseen: dict[str, Counts] = {}
    for name, request in counted.requests.items():
        if request.class_ids and not request.client_ids and not request.sample_ids:
            forgotten[name] = counter.of_labels(before, after, held_out, request)
        elif len(rows := counter.named(request, client.train)):
            forgotten[name] = counter.of_rows(before, after, rows)
            unseen[name] = counter.of_rows(before, after, held_out)
    return Tally(classes[0], classes[1], forgotten, unseen)


def _class_rows(rows: Tensor, data: ClientData) -> Tensor:
    """Some rows of each class."""
    labels = data.y[rows]
    by_label = [rows[labels == label] for label in labels.unique().tolist()]
    return torch.cat([rows[:0], *(data.some(own, MOST_CLASS_ROWS) for own in by_label)])


def _request_rows(data: ClientData, request: Forget) -> Tensor:
    """Some of the training rows that a request names by client or sample."""
    of_client = Forget(request.client_ids, frozenset(), request.sample_ids)
    return data.some(named_rows(data.client, of_client, data.client.train, data.y)[0], MOST_ROWS)


def _alike(held_out: Tensor, rows: Tensor, data: ClientData) -> Tensor:
    """Some held-out rows of the same classes."""
    return data.some(held_out[torch.isin(data.y[held_out], data.y[rows].unique())], MOST_ROWS)


def _count(before: nn.Module, after: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> dict[int, Paired]:
    labels = y[rows]
    hits = [answers(model, x, rows) == labels for model in (before, after)]
    counts = {}
    for label in labels.unique().tolist():
        first, second = (hit[labels == label] for hit in hits)
        counts[label] = Paired(len(first), int(first.sum()), int(second.sum()), int((first & second).sum()))
    return counts


def _carried(before: nn.Module, after: nn.Module, x: Tensor, rows: Tensor, shares: Mapping[int, float]) -> Paired:
    """How often the carried labels are answered, weighted by their shares."""
    first, second = (
        sum((share * (given == label).double() for label, share in shares.items()), torch.zeros(len(rows)).double())
        for given in (answers(model, x, rows).cpu() for model in (before, after))
    )
    return Paired(len(rows), float(first.sum()), float(second.sum()), float(torch.minimum(first, second).sum()))


def answers(model: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    """The classes that a model answers. (N,)"""
    given = [logits_of(model(x.index_select(0, batch))).argmax(1) for batch in rows.split(FEATURE_BATCH) if len(batch)]
    return torch.cat(given) if given else rows[:0]


def _rows_of(counts: Counts) -> list[list[float]]:
    return [[label, hits.rows, hits.before, hits.after, hits.both] for label, hits in sorted(counts.items())]
