from contextlib import suppress
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import dirichlet, iid, pathological
from fedup.errors import SettingError

few = settings(max_examples=25, deadline=None, derandomize=True)
LABELS = torch.arange(100) % 10
schemes = pytest.mark.parametrize("scheme", [iid, dirichlet, pathological])


@st.composite
def federations(draw):
    """Labels, a number of clients and a minimum that leaves a Dirichlet draw room."""
    clients = draw(st.integers(1, 6))
    labels = draw(st.lists(st.integers(0, 4), min_size=12 * clients, max_size=150))
    return torch.tensor(labels), clients, draw(st.integers(1, 3))


@schemes
@few
@given(federations(), st.integers(0, 1000))
def test_every_row_has_one_holder_and_every_client_the_minimum_of_rows_sorted(scheme, federation, seed):
    labels, clients, min_rows = federation
    parts = scheme(labels, clients, seed=seed, min_rows=min_rows)
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
    assert min(map(len, parts)) >= min_rows
    assert all(torch.equal(part, part.sort().values) for part in parts)


def test_pathological_never_falls_short_of_the_minimum_in_silence():
    for seed in range(5):  # shards of 3 and 4 rows: most ways to deal out three each leave a client with nine
        with suppress(SettingError):
            parts = pathological(LABELS, 10, classes_per_client=3, min_rows=10, seed=seed)
            assert min(map(len, parts)) >= 10


@schemes
def test_parts_depend_on_the_seed_alone(scheme):
    labels = torch.arange(300) % 10
    expected = torch.cat(scheme(labels, 5, seed=3))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(torch.cat(scheme(labels, 5, seed=3)), expected)
    assert not torch.equal(torch.cat(scheme(labels, 5, seed=4)), expected)


@few
@given(st.integers(1, 7), st.integers(70, 200))
def test_iid_shares_differ_by_one_row_at_most(clients, rows):
    sizes = [len(part) for part in iid(torch.zeros(rows, dtype=torch.long), clients)]
    assert max(sizes) - min(sizes) <= 1


def test_a_small_concentration_makes_clients_more_unequal():
    labels = torch.arange(2000) % 10

    def largest_class_share(concentration):
        parts = dirichlet(labels, 5, concentration=concentration, seed=1)
        return sum(float(labels[part].bincount(minlength=10).max() / len(part)) for part in parts) / 5

    assert largest_class_share(0.1) > largest_class_share(1.0) > largest_class_share(100.0)
    assert largest_class_share(100.0) < 0.2  # 0.1 when every client has the same mixture


def test_pathological_clients_see_few_classes():
    labels = torch.arange(1000) % 10
    for few_classes in (1, 2, 5):
        parts = pathological(labels, 10, classes_per_client=few_classes)
        assert all(len(labels[part].unique()) <= few_classes for part in parts)


def test_impossible_settings_say_so():
    for call, message in (
        *((partial(iid, LABELS, clients), f"100 rows cannot give {clients} clients") for clients in (0, -1, 11)),
        (partial(iid, LABELS[:0], 1), "0 rows cannot"),
        (partial(dirichlet, LABELS, 11), "cannot give 11 clients at least 10 rows"),
        *(
            (partial(dirichlet, LABELS, 4, concentration=value), f"must be .*found {value}")
            for value in (0.0, -1.0, float("nan"), float("inf"))
        ),
        (partial(dirichlet, LABELS, 10, concentration=0.01), "left one below 10 rows: use fewer clients"),
        (partial(pathological, LABELS, 11), "cannot give 11 clients"),
        *(
            (partial(pathological, LABELS, 5, classes_per_client=value), f"between 1 and 20; found {value}")
            for value in (0, 21)
        ),
    ):
        with pytest.raises(SettingError, match=message):
            call()
