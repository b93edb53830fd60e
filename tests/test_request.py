import json
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import Forget
from fedup.errors import RequestError
from fedup.request import check_known, union

few = settings(max_examples=30, deadline=None, derandomize=True)
ids = st.frozensets(st.integers(0, 5), max_size=4)
samples = st.dictionaries(st.integers(0, 5), st.frozensets(st.integers(0, 5), min_size=1, max_size=3), max_size=3)
requests = st.builds(Forget, ids, ids, samples)


@few
@given(st.lists(requests, max_size=4))
def test_union_depends_neither_on_order_nor_on_repetition(many):
    assert len({union(order) for order in permutations(many)}) == 1
    assert union([*many, *many, Forget()]) == union(many)
    assert {request | request == request == request | Forget() for request in many} <= {True}


@few
@given(requests, requests)
def test_union_forgets_what_either_forgets_and_nothing_else(a, b):
    both = a | b
    assert both.client_ids == a.client_ids | b.client_ids and both.class_ids == a.class_ids | b.class_ids
    pairs = [{(client, i) for client, ids in r.sample_ids.items() for i in ids} for r in (a, b, both)]
    assert pairs[2] == pairs[0] | pairs[1]


@few
@given(requests)
def test_what_each_client_is_told_of_a_request_names_no_other_client_and_is_all_of_it_together(request):
    parts = {client: request.at(client) for client in range(6)}
    assert union(parts.values()) == request
    assert all(part.client_ids | part.sample_ids.keys() <= {client} for client, part in parts.items())


@few
@given(requests)
def test_json_round_trip_through_text(request):
    back = Forget.from_json(json.loads(json.dumps(request.to_json())))
    assert back == request and back.digest == request.digest
    assert hash(back) == hash(request)


@few
@given(requests, requests)
def test_digests_are_equal_exactly_for_equal_requests(a, b):
    assert (a.digest == b.digest) == (a == b)


def test_a_digest_is_the_same_in_every_process():
    request = Forget.classes([7]) | Forget.samples({10: [3, 1], 9: [2]})
    assert request.digest == "c5c5b6e8e2f4988f619049b3f6054ab1bb1cc3638474f664de6ef6334cbcb423"


def test_ids_come_from_lists_ranges_arrays_and_tensors_alike():
    expected = Forget.clients([0, 1, 2])
    for same in (range(3), {2, 1, 0}, np.arange(3), torch.arange(3), [0, 1, 2, 2], iter([2, 1, 0])):
        assert Forget.clients(same) == expected
    assert Forget.samples({np.int64(3): torch.tensor([5])}) == Forget.samples({3: [5]})


def test_kind_and_text_name_what_is_forgotten():
    request = Forget.samples({3: [10, 11]}) | Forget.classes([7]) | Forget.clients([2])
    assert request.kind == "client+class+sample"
    assert str(request) == "forget clients [2] and classes [7] and 2 samples of client 3"
    assert Forget().kind == ""


odd_ids = (
    st.text()
    | st.binary()
    | st.none()
    | st.integers()
    | st.lists(st.integers(max_value=-1) | st.floats() | st.booleans() | st.text() | st.none(), max_size=3)
    | st.just([0, 1.5])
    | st.just(torch.tensor([[1, 2]]))
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(odd_ids)
def test_ids_that_are_no_list_of_whole_numbers_are_refused(bad):
    for make in (Forget.clients, Forget.classes, lambda ids: Forget.samples({0: ids}), Forget.samples):
        with pytest.raises(RequestError, match=r"whole numbers|forgets nothing|maps clients"):
            make(bad)


def test_sample_requests_map_clients_to_ids():
    for bad in ({}, {-1: [3]}, {"0": [3]}, {0: [1], 1: []}):
        with pytest.raises(RequestError, match=r"whole numbers|forgets nothing"):
            Forget.samples(bad)


known = partial(check_known, clients=[0, 1, 4], num_classes=3)


def test_what_is_unknown_or_would_leave_nothing_is_refused():
    for request, message in (
        (Forget(), "forgets nothing"),
        (Forget.clients([0, 5]), r"Unknown client \[5\].*\[0, 1, 4\]"),
        (Forget.samples({3: [1]}), r"Unknown client \[3\]"),
        (Forget.clients([0]) | Forget.classes([3]), r"Unknown class \[3\].*0 to 2"),
        (Forget.clients([0, 1, 4]), "leaves nothing"),
        (Forget.classes([0, 1, 2]), "leaves nothing"),
    ):
        with pytest.raises(RequestError, match=message):
            known(request)
    for request in (Forget.clients([0, 4]), Forget.classes([0, 2]), Forget.samples({4: [99]})):
        known(request)
