"""Integer moments: exact sums, whatever the order, the batch or the block."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import DataError, SettingError
from fedup.statistics import integer_moments
from fedup.statistics.integer_moments import IntegerMoments, MomentConfig, packed, retained_mask, unpacked

CONFIG = MomentConfig(bound=8.0, step=2.0**-8)


def rows_of(seed, n=40, width=5, scale=2.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, width, generator=source), torch.randint(3, (n,), generator=source)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=40, max_size=40), st.permutations(range(4)))
def test_parts_add_up_to_the_whole_in_any_order_and_subtract_to_what_is_left(seed, owners, order):
    features, labels = rows_of(seed)
    owners = torch.tensor(owners)
    whole = IntegerMoments.of(features, labels, 3, CONFIG)
    parts = [IntegerMoments.of(features[owners == i], labels[owners == i], 3, CONFIG) for i in range(4)]
    total = IntegerMoments.zeros(3, 5)
    for i in order:
        total = total + parts[i]
    assert total == whole
    others = owners != order[0]
    assert whole - parts[order[0]] == IntegerMoments.of(features[others], labels[others], 3, CONFIG)


@pytest.mark.parametrize("shape", [(1, 5), (3, 4)])
def test_moments_of_other_classes_or_features_do_not_add_up(shape):
    whole = IntegerMoments.of(*rows_of(0), 3, CONFIG)
    for combine in (operator.add, operator.sub):
        with pytest.raises(DataError, match="do not add up"):
            combine(whole, IntegerMoments.zeros(*shape))


def test_second_moments_are_the_exact_integers_whatever_the_block(monkeypatch):
    features, labels = rows_of(0, n=300, scale=5.0)
    moments = IntegerMoments.of(features, labels, 3, CONFIG)
    rows = [[int(number) for number in row] for row in CONFIG.integers(features)[0].tolist()]
    exact = [sum(row[i] * row[j] for row in rows) for i in range(5) for j in range(i + 1)]
    assert moments.second.tolist() == exact
    monkeypatch.setattr(integer_moments, "_EXACT", CONFIG.limit**2 * 7)  # blocks of seven rows
    assert IntegerMoments.of(features, labels, 3, CONFIG) == moments


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 1e6))
def test_integers_lie_within_the_bound_and_within_a_step_of_the_features(seed, scale):
    features, _ = rows_of(seed, scale=scale)
    integers, shortened = CONFIG.integers(features)
    assert float(integers.norm(dim=1).max()) <= CONFIG.limit
    assert shortened == int((features.double().norm(dim=1) > CONFIG.bound).sum())
    inside = features.norm(dim=1) <= CONFIG.bound
    error = (integers[inside] * CONFIG.step - features[inside].double()).abs()
    assert not error.numel() or float(error.max()) <= CONFIG.step
    assert bool((integers[inside].abs() * CONFIG.step <= features[inside].double().abs() + 1e-12).all())  # towards 0


def test_a_triangle_is_the_matrix():
    matrix = torch.randn(6, 6).double()
    matrix = matrix + matrix.T
    assert torch.equal(unpacked(packed(matrix), 6), matrix)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["count", "sum", "diagonal", "indefinite", "large", "many"]))
def test_what_no_rows_have_is_refused(seed, damage):
    features, labels = rows_of(seed)
    moments = IntegerMoments.of(features, labels, 3, CONFIG)
    moments.check(CONFIG)
    dense = moments.dense_second()
    if damage == "count":
        moments.counts[0] = -1
    elif damage == "sum":
        moments.sums[1] = int(CONFIG.limit) * (int(moments.counts[1]) + 1)
    elif damage == "diagonal":
        dense[2, 2] = -1
    elif damage == "indefinite":
        dense -= 0.5 * dense.diagonal().sum() * torch.eye(5)
    elif damage == "large":
        dense *= 1e5
    else:
        moments.counts[0] = CONFIG.most_rows + 1
    with pytest.raises(DataError):
        IntegerMoments(moments.counts, moments.sums, packed(dense).long()).check(CONFIG)


@pytest.mark.parametrize("width", [40, 128])
@pytest.mark.parametrize("place", ["first", "last"])
def test_squares_that_are_one_step_too_small_for_the_other_products_are_refused(width, place):
    """Of fewer rows than features: their second moments have no room below."""
    features = torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    moments = IntegerMoments.of(features, torch.arange(20) % 3, 3, CONFIG)
    moments.check(CONFIG)
    moments.second[0 if place == "first" else -1] -= 1
    with pytest.raises(DataError, match="not those of any rows"):
        moments.check(CONFIG)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=30, max_size=30), st.integers(1, 6))
def test_no_change_of_few_rows_shows_by_itself(out, least):
    """Against all rows of a client: none of a class, or at least so many, leave and stay."""
    labels, left_out = torch.arange(30) % 3, torch.tensor(out)
    kept = retained_mask(labels, left_out, MomentConfig(least_rows=least))
    assert not bool((kept & left_out).any())
    for label in range(3):
        own = labels == label
        staying, leaving = int((kept & own).sum()), int((~kept & own).sum())
        assert staying == 0 or (staying >= least and (leaving == 0 or leaving >= least))


@pytest.mark.parametrize("bad", [{"bound": 0}, {"bound": float("nan")}, {"step": 1e-9}, {"least_rows": 0}])
def test_a_grid_that_cannot_be_exact_is_refused(bad):
    with pytest.raises(SettingError):
        MomentConfig(**bad)
