"""Rows and labels of whatever a user's `data(context)` gives: all of them, in order, or a clear error."""

from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from tests.flower._grid import be_inside_a_run
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
)

from fedup.errors import DataError, MissingDataError
from fedup.flower import mount
from fedup.flower.rows import rows_of
from fedup.flower.wire import Ask, read_answer, write_ask

SECRET = "the patient's name"


class Items(Dataset):
    """Items that are given."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


class Stream(IterableDataset):
    """Without numbers, though it has a length."""

    def __len__(self):
        return 1

    def __iter__(self):
        yield torch.zeros(2), 0


class Broken(Dataset):
    """Fails as a user's own code may: with a text that is nobody else's."""

    def __init__(self, error, length=2):
        self.error, self.length = error, length

    def __len__(self):
        return self.length if self.length is not None else self._fail()

    def __getitem__(self, number):
        return (torch.zeros(2), 0) if number == 0 else self._fail()

    def _fail(self):
        raise self.error(SECRET)


class Named(NamedTuple):
    row: torch.Tensor
    label: int


def row(value=0.0):
    return torch.full((3, 2), value)


WAYS = {
    "tuples": lambda x, y: (x, y),
    "lists": lambda x, y: [x, y],
    "named tuples": Named,
    "mappings": lambda x, y: {"img": x, "label": y},
    "label first": lambda x, y: {"label": y, "img": x},
    "other mappings": lambda x, y: UserDict({"pixels": x, "kind": y}),
}
LABELS = {
    "int": int,
    "tensor": torch.tensor,
    "tensor of one": lambda y: torch.tensor([y]),
    "numpy": np.int32,
    "array of one": lambda y: np.array([y]),
    "float": float,
    "numpy float": np.float32,
}
labels_of_all = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


def test_a_pair_of_tensors_is_what_it_was():
    x, y = torch.rand(2, 3), torch.tensor([1, 0])
    for pair in ((x, y), [x, y]):
        assert rows_of(pair)[0] is x and rows_of(pair)[1] is y


@given(
    labels=labels_of_all,
    way=st.sampled_from(list(WAYS)),
    kind=st.sampled_from(list(LABELS)),
    arrays=st.booleans(),
    loader=st.booleans(),
    shuffle=st.booleans(),
    batch=st.integers(1, 5),
)
def test_every_item_is_there_once_in_the_data_sets_order(labels, way, kind, arrays, loader, shuffle, batch):
    x = torch.rand(len(labels), 3, 2)
    rows = [one.numpy() if arrays else one for one in x]
    items = Items([WAYS[way](one, LABELS[kind](label)) for one, label in zip(rows, labels, strict=True)])
    found = rows_of(DataLoader(items, batch_size=batch, shuffle=shuffle, drop_last=shuffle) if loader else items)
    assert torch.equal(found[0], x) and found[0].dtype == x.dtype
    assert found[1].tolist() == labels and found[1].dtype == torch.int64


def test_a_row_that_is_now_and_then_a_whole_number_is_no_label():
    x, y = rows_of([{"x": torch.tensor(2.0), "y": 1}, {"x": torch.tensor(2.5), "y": 0}])
    assert x.tolist() == [2.0, 2.5] and y.tolist() == [1, 0]


def test_a_loader_that_reads_a_part_alone_is_an_error():
    whole, part = Items([(row(), 1)] * 4), SubsetRandomSampler([0, 2])
    for loader in (
        DataLoader(whole, sampler=part),
        DataLoader(whole, batch_sampler=BatchSampler(part, 2, drop_last=False)),
    ):
        with pytest.raises(DataError, match="Subset instead"):
            rows_of(loader)


@pytest.mark.parametrize("length", [2, None])
@pytest.mark.parametrize("error", [KeyError, MissingDataError, DataError])
def test_a_failure_of_the_users_code_is_told_by_its_kind_alone(error, length):
    with pytest.raises(DataError) as caught:
        rows_of(Broken(error, length))
    assert error.__name__ in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("data", [Broken(MissingDataError), Broken(KeyError, None), Items([(row(), SECRET)])])
def test_a_node_sends_no_text_of_the_users_code(data):
    be_inside_a_run()
    app, context = ClientApp(), Context(0, 7, {"partition-id": 0}, RecordDict(), {})
    mount(app, data=lambda context: DataLoader(data, shuffle=True), model=lambda: nn.Linear(2, 2))
    ask = write_ask(Ask("labels", "base", {"samples": [0], "num_classes": 2}))
    reply = app(Message(ask, dst_node_id=7, message_type="query.fedup"), context)
    answer = read_answer(reply.content, most_bytes=10**6)
    assert answer.status == "failed" and answer.reason
    assert SECRET not in answer.reason


ODD = {
    "empty": [],
    "differ in shape": [(row(), 1), (torch.zeros(2, 3), 1)],
    "differ in shape or type": [(row(), 1), (row().double(), 1)],
    "neither": [{"img": row(), "label": 1}, {"img": row(), "label": 1.5}],
    "both": [{"img": torch.tensor(2), "label": 1}],
    "different entries": [{"img": row(), "label": 1}, (row(), 1)],
    "two entries: one is not": [{"img": row(), "label": 1, "id": 7}],
    "one is not": [row()],
    "tensors or arrays; found list": [([1.0, 2.0], 1)],
    "of numbers": [(np.array([object()]), 1)],
}


@given(st.sampled_from(sorted(ODD)), st.booleans())
def test_items_that_are_no_rows_with_labels_are_an_error(text, loader):
    with pytest.raises(DataError, match=text):
        rows_of(DataLoader(Items(ODD[text])) if loader else Items(ODD[text]))


@given(st.floats().filter(lambda label: not label.is_integer()) | st.just(2**63) | st.text() | st.none())
def test_a_label_that_is_no_whole_number_is_an_error(label):
    for odd in (label, torch.tensor([1, 2])):
        with pytest.raises(DataError, match="no whole number"):
            rows_of(Items([(row(), 1), (row(), odd)]))


def test_what_has_no_items_is_an_error():
    pair = np.zeros((2, 3)), np.zeros(2)
    for given_ in (None, 3, "rows", {"train": Items([(row(), 1)])}, Stream(), DataLoader(Stream()), row(), pair):
        with pytest.raises(DataError):
            rows_of(given_)
