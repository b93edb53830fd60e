from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import dirichlet, iid, pathological
from fedup.errors import SettingError

few = settings(max_examples=40, deadline=None, derandomize=True)
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
def test_every_row_has_exactly_one_holder(scheme, federation, seed):
    labels, clients, min_rows = federation
    parts = scheme(labels, clients, seed=seed, min_rows=min_rows)
    assert len(parts) == clients
    assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))


@schemes
@few
@given(federations(), st.integers(0, 1000))
def test_every_client_has_the_minimum_of_rows_sorted(scheme, federation, seed):
    labels, clients, min_rows = federation
    for part in scheme(labels, clients, seed=seed, min_rows=min_rows):
        assert len(part) >= min_rows
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize("seed", range(5))
def test_pathological_never_falls_short_of_the_minimum_in_silence(seed):
    try:  # shards of 3 and 4 rows: most ways to deal out three each leave a client with nine
        parts = pathological(torch.arange(100) % 10, 10, classes_per_client=3, min_rows=10, seed=seed)
    except SettingError:
        return
    assert min(map(len, parts)) >= 10


@schemes
def test_same_seed_same_parts_and_another_seed_others(scheme):
    labels = torch.arange(300) % 10
    first, again, other = (torch.cat(scheme(labels, 5, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@schemes
def test_parts_do_not_depend_on_the_global_random_state(scheme):
    labels = torch.arange(300) % 10
    expected = scheme(labels, 5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert all(map(torch.equal, scheme(labels, 5), expected))


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


@pytest.mark.parametrize("classes_per_client", [1, 2, 5])
def test_pathological_clients_see_few_classes(classes_per_client):
    labels = torch.arange(1000) % 10
    parts = pathological(labels, 10, classes_per_client=classes_per_client)
    assert all(len(labels[part].unique()) <= classes_per_client for part in parts)


LABELS = torch.arange(100) % 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(iid, LABELS, 0), "cannot give 0 clients"),
        (partial(iid, LABELS, -1), "cannot give -1 clients"),
        (partial(iid, LABELS, 11), "100 rows cannot give 11 clients at least 10 rows"),
        (partial(iid, LABELS[:0], 1), "0 rows cannot"),
        (partial(dirichlet, LABELS, 11), "cannot give 11 clients"),
        (partial(dirichlet, LABELS, 4, concentration=0.0), "must be .*found 0"),
        (partial(dirichlet, LABELS, 4, concentration=-1.0), "must be .*found -1"),
        (partial(dirichlet, LABELS, 4, concentration=float("nan")), "must be .*found nan"),
        (partial(dirichlet, LABELS, 4, concentration=float("inf")), "must be .*found inf"),
        (partial(dirichlet, LABELS, 10, concentration=0.01), "left one below 10 rows: use fewer clients"),
        (partial(pathological, LABELS, 11), "cannot give 11 clients"),
        (partial(pathological, LABELS, 5, classes_per_client=0), "between 1 and 20; found 0"),
        (partial(pathological, LABELS, 5, classes_per_client=21), "between 1 and 20; found 21"),
    ],
)
def test_impossible_settings_say_so(call, message):
    with pytest.raises(SettingError, match=message):
        call()
