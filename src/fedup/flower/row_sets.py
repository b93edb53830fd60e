"""The rows behind each number of an answer, as sets of places: what a node's rules are checked against."""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from fedup.clients.biases import BiasesQuestion
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.delta import DeltaQuestion
from fedup.clients.eraser_questions import SecondMomentsQuestion, SketchesQuestion, SpreadsQuestion
from fedup.clients.labels import LabelsQuestion
from fedup.clients.moments import MomentChangeQuestion, MomentsQuestion
from fedup.clients.question import ClientData, ExactQuestion
from fedup.clients.subjects import SubjectsQuestion
from fedup.clients.tally import TallyQuestion
from fedup.federation import named_rows
from fedup.flower.node_record import WithheldError
from fedup.statistics.eraser_statistics import MOST_REFERENCE_ROWS, RowGroups, second_moment_rows
from fedup.statistics.tally import rows_counted
from fedup.targets import kind_of


def sets_of(question: ExactQuestion[Any], data: ClientData, *, with_named: bool) -> list[Tensor]:
    """The sets of rows that the answer has numbers of. `with_named` adds the named rows of each class: without them a
    server could find out whether the client holds a row."""
    sets = list(row_sets(question, data))
    for mask in _named(question, data) if with_named else ():
        sets += _by_class(mask, data)
    return [rows for rows in sets if len(rows)]


@singledispatch
def row_sets(question: ExactQuestion[Any], data: ClientData) -> Iterator[Tensor]:
    """By kind of question; one that is not known here is not answered."""
    raise WithheldError(f"nobody has said which rows are behind an answer to {question.kind!r}")


@row_sets.register
def _(question: LabelsQuestion, data: ClientData) -> Iterator[Tensor]:
    yield from ()  # no sums: rules allow the classes of named rows, or not


@row_sets.register
def _(question: SubjectsQuestion, data: ClientData) -> Iterator[Tensor]:
    yield from ()  # no sums either: rules allow to name the rows of persons, or not


@row_sets.register
def _(question: MomentsQuestion, data: ClientData) -> Iterator[Tensor]:
    chosen, _ = question.chosen(data)
    yield from _by_class(chosen, data)


@row_sets.register
def _(question: MomentChangeQuestion, data: ClientData) -> Iterator[Tensor]:
    for change in question.changes(data):
        yield from _by_class(change, data)


@row_sets.register
def _(question: CentroidsQuestion, data: ClientData) -> Iterator[Tensor]:
    wanted, enough, out = question.cells(data)
    for label in enough:
        yield data.client.train[(data.y[data.client.train] == label) & ~out]
    held = data.y[data.client.train]
    yield from (data.client.train[held == label] for label in wanted)  # of which it tells how many they are


@row_sets.register
def _(question: SketchesQuestion, data: ClientData) -> Iterator[Tensor]:
    yield from question.groups.forgotten(data.client, data.y).values()
    least, retained = min(data.least_rows, MOST_REFERENCE_ROWS), question.groups.retained(data.client, data.y)
    yield from (rows for rows in retained.values() if len(rows) >= least)


@row_sets.register
def _(question: SpreadsQuestion, data: ClientData) -> Iterator[Tensor]:
    yield from question.groups.forgotten(data.client, data.y).values()
    used = {label for shares in question.weights_used(data).values() for label, share in shares.items() if share}
    retained = question.groups.retained(data.client, data.y)
    yield from (rows for label, rows in retained.items() if label in used)


@row_sets.register
def _(question: SecondMomentsQuestion, data: ClientData) -> Iterator[Tensor]:
    rows = second_moment_rows(data, question.groups, granularity=question.over)
    if rows is not None:
        yield rows


@row_sets.register
def _(question: BiasesQuestion, data: ClientData) -> Iterator[Tensor]:
    for rows in question.counted(data):
        yield from (group for group in _groups(rows, data) if len(group) >= data.least_rows)


@row_sets.register
def _(question: TallyQuestion, data: ClientData) -> Iterator[Tensor]:
    for by_label, rows in rows_counted(data, question.rows):
        groups = _groups(rows, data) if by_label else [rows]
        yield from (group for group in groups if len(group) >= data.least_rows)


@row_sets.register
def _(question: DeltaQuestion, data: ClientData) -> Iterator[Tensor]:
    rows = question.rows(data)
    yield from (rows.forgotten, rows.retained, rows.unseen)


def _by_class(mask: Tensor, data: ClientData) -> list[Tensor]:
    """The chosen training rows (a mask) of each class, by place; of labels and values also all of them."""
    return _groups(data.client.train[mask], data)


def _groups(rows: Tensor, data: ClientData) -> list[Tensor]:
    y = data.y[rows]
    if kind_of(data.y) == "classes":
        return [rows[y == label] for label in y.unique().tolist()]
    return [rows, *(rows[column] for column in y.T)] if kind_of(data.y) == "labels" else [rows]


def _named(question: ExactQuestion[Any], data: ClientData) -> Iterator[Tensor]:
    """Masks of the training rows that a question names by id, or by place where it has been given places."""
    ids, rows = data.sample_ids, data.client.train
    for name in ("excluded", "before", "samples"):
        if isinstance(named := getattr(question, name, None), frozenset):
            yield torch.isin(ids, torch.tensor(sorted(named), dtype=ids.dtype, device=ids.device))
    for groups in (value for value in vars(question).values() if isinstance(value, RowGroups)):
        for request in (*groups.requests.values(), groups.forget_set):
            samples = type(request)(sample_ids=request.sample_ids) if request.sample_ids else None
            if samples is not None:
                yield torch.isin(rows, named_rows(data.client, samples, rows, data.y)[0])
