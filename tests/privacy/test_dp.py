"""The guarantee's settings, and what a client computes before noise: a record or subject moves it by a known bound."""

import dataclasses
import math

import pytest
import torch
from dp_accounting import get_sigma_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import DataError, SettingError
from fedup.privacy import DP
from fedup.privacy import dp as mechanism
from fedup.privacy.dp import Layout, joint_vector, multiply_in_batches
from fedup.rng import generator

INF, NAN = float("inf"), float("nan")
SLACK = 1 + 1e-9  # of sums of floats
many = settings(max_examples=50, deadline=None, derandomize=True)
few = settings(max_examples=30, deadline=None, derandomize=True)
norms = st.sampled_from([0.0, 1e-300, 1e-30, 1e-3, 0.5, 1.0, 1.5, 1e3, 1e30, 1e200])
weights = st.floats(0.01, 20)
clips = st.just("unit") | st.floats(1e-3, 1e3)


@dataclasses.dataclass
class Rows:
    """Records of a client: projected features of any length, classes, owners."""

    points: torch.Tensor
    labels: torch.Tensor
    subjects: torch.Tensor
    num_classes: int

    def told(self, dp, some=slice(None)):
        points, labels, subjects = self.points[some], self.labels[some], self.subjects[some]
        return joint_vector(dp, points, labels, subjects if dp.unit == "subject" else None, self.num_classes)


@st.composite
def rows_of_a_client(draw, least=1, most=12):
    dims, num_classes, many = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(least, most))
    each = {"min_size": many, "max_size": many}
    lengths = torch.tensor(draw(st.lists(norms, **each)), dtype=torch.float64)
    draws = torch.randn(
        many, dims, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))), dtype=torch.float64
    )
    labels = draw(st.lists(st.integers(0, num_classes - 1), **each))
    subjects = draw(st.lists(st.sampled_from([0, 3, 4, 10**12]), **each))
    points = lengths[:, None] * draws / draws.norm(dim=1, keepdim=True)
    return Rows(points, torch.tensor(labels), torch.tensor(subjects), num_classes)


def _dp(**options):
    return DP(1.0, **{"clip": "unit", **options})


@st.composite
def guarantees(draw, unit="record"):
    return _dp(
        clip=draw(clips),
        unit=unit,
        cells=draw(st.integers(1, 5)),
        count_weight=draw(weights),
        spread_weight=draw(weights),
    )


# --- records


@many
@given(guarantees(), rows_of_a_client())
def test_a_record_that_is_cut_to_the_clip_moves_it_by_the_sensitivity_exactly(dp, rows):
    rows.points[0] = torch.nn.functional.normalize(torch.ones(rows.points.shape[1]).double(), dim=0) * 2 * dp.scale
    moved = (rows.told(dp) - rows.told(dp, slice(1, None))).norm()
    assert moved == pytest.approx(dp.sensitivity, rel=1e-7)


@many
@given(guarantees(), rows_of_a_client(), st.integers(0, 12))
def test_disjoint_records_add_up(dp, rows, first):
    both = rows.told(dp, slice(first)) + rows.told(dp, slice(first, None))
    torch.testing.assert_close(rows.told(dp), both, atol=1e-9, rtol=1e-9)


@few
@given(rows_of_a_client(), st.integers(1, 5), st.floats(0.1, 10))
def test_it_tells_counts_sums_and_second_moments(rows, cells, clip):
    """By hand: the definition, row by row."""
    dp = _dp(clip=clip, cells=cells, count_weight=0.7, spread_weight=1.3)
    layout = Layout.of(dp, rows.points.shape[1], rows.num_classes)
    sums, counts, spread = layout.split(rows.told(dp))
    norms = [math.hypot(*point.tolist()) for point in rows.points]  # which no square overflows in
    clipped = [point / max(norm, clip) for point, norm in zip(rows.points, norms, strict=True)]
    for label in range(rows.num_classes):
        own = [point for point, of in zip(clipped, rows.labels, strict=True) if of == label]
        total = sum(own, start=torch.zeros(layout.dims, dtype=torch.float64))
        squares = sum((torch.outer(point, point) for point in own), start=torch.zeros(layout.dims, layout.dims))
        torch.testing.assert_close(sums[label].sum(0), total, atol=1e-9, rtol=1e-9)
        assert float(counts[label].sum()) == pytest.approx(0.7 * len(own))
        torch.testing.assert_close(layout.matrix(spread[label]), 1.3 * squares.double(), atol=1e-9, rtol=1e-9)


@few
@given(rows_of_a_client(), st.integers(2, 5))
def test_which_cell_a_record_falls_into_depends_on_that_record_alone(rows, cells):
    dp, alone = _dp(cells=cells), range(len(rows.points))
    counts = [Layout.of(dp, rows.points.shape[1], rows.num_classes).split(rows.told(dp, [i]))[1] for i in alone]
    assert all(int((one > 0).sum()) == 1 for one in counts)
    together = Layout.of(dp, rows.points.shape[1], rows.num_classes).split(rows.told(dp))[1]
    torch.testing.assert_close(sum(counts), together)


# --- subjects


@many
@given(guarantees("subject"), rows_of_a_client(most=20), st.sampled_from([1, 2, 3, 7, 4096]))
def test_all_records_of_a_subject_move_the_joint_vector_by_no_more_than_the_sensitivity(dp, rows, at_once):
    whose = int(rows.subjects[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "_ROWS_AT_ONCE", at_once)
        moved = rows.told(dp) - rows.told(dp, rows.subjects != whose)
        alone = rows.told(dp, rows.subjects == whose)
    assert moved.norm() <= dp.sensitivity * SLACK
    torch.testing.assert_close(moved, alone, atol=1e-9, rtol=1e-9)  # what others tell is as it was


@few
@given(rows_of_a_client(most=30), st.integers(1, 9), st.sampled_from(["record", "subject"]))
def test_how_many_rows_are_taken_at_once_changes_nothing(rows, at_once, unit):
    dp = _dp(unit=unit, cells=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "_ROWS_AT_ONCE", at_once)
        pieces = rows.told(dp)
    torch.testing.assert_close(pieces, rows.told(dp), atol=1e-12, rtol=1e-12)


# --- the layout


@few
@given(st.integers(1, 7), st.integers(1, 5), st.booleans(), st.integers(0, 999))
def test_what_is_split_is_joined_again(dims, cells, full, seed):
    layout = Layout(dims, cells, full)
    vectors = torch.randn(3, layout.size, generator=torch.Generator().manual_seed(seed))
    sums, counts, spread = layout.split(vectors)
    assert (sums.shape, counts.shape, spread.shape) == ((3, cells, dims), (3, cells), (3, layout.spread))
    assert torch.equal(layout.join(sums, counts, spread), vectors)


def test_only_variances_are_told_where_all_second_moments_would_be_too_many():
    dp, dims, num_classes = _dp(clip=1.0), 99, 100
    layout = Layout.of(dp, dims, num_classes)
    assert not layout.full
    assert Layout.of(dp, 9, 10).full
    points = torch.randn(20, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points[0] = 2 * torch.eye(dims)[7]
    labels = torch.arange(20)
    whole, rest = (joint_vector(dp, points[i:], labels[i:], None, num_classes) for i in (0, 1))
    assert (whole - rest).norm() == pytest.approx(dp.sensitivity)  # along an axis nothing of the spread is lost
    alone = joint_vector(dp, points[1:2], labels[1:2], None, num_classes)
    assert 0.7 * dp.sensitivity < alone.norm() <= dp.sensitivity


@pytest.mark.parametrize("num_classes", [2, 10, 24, 50, 100])
@pytest.mark.parametrize("dims", [1, 19, 62, 99, 128])
def test_a_message_takes_no_more_than_a_megabyte(num_classes, dims):
    assert 4 * num_classes * Layout.of(_dp(), dims, num_classes).size <= 1_000_000


# --- refused


@pytest.mark.parametrize("unit", ["record", "subject"])
def test_a_row_with_a_label_that_no_class_has_adds_nothing(unit):
    points, owner = torch.ones(4, 3), torch.arange(4)
    labels = torch.tensor([0, 2, -1, torch.iinfo(torch.int64).max])
    told = joint_vector(_dp(unit=unit), points, labels, owner, 2)
    assert torch.equal(told, joint_vector(_dp(unit=unit), points[:1], labels[:1], owner[:1], 2))


anything = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True) | st.sampled_from(
    [NAN, INF, -INF, 1e308, -1.7e308, 5e-324, 1e-170, 0.0]
)


@many
@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 8))
def test_no_row_whatever_it_holds_moves_the_joint_vector_beyond_the_sensitivity(data, dims, num_classes, n):
    dp = _dp(
        clip=data.draw(st.sampled_from(["unit", 1.0, 1e-300, 5e-324, 1e300])),
        cells=data.draw(st.integers(1, 3)),
        count_weight=data.draw(st.sampled_from([1e-3, 0.5, 1e3])),
        spread_weight=data.draw(st.sampled_from([1e-3, 1.0, 1e3])),
    )
    each = {"min_size": n, "max_size": n}
    rows = data.draw(st.lists(st.lists(anything, min_size=dims, max_size=dims), **each))
    points = torch.tensor(rows, dtype=torch.float64)
    labels = torch.tensor(data.draw(st.lists(st.integers(-2, num_classes + 1) | st.just(2**62), **each)))
    rest = torch.arange(n) != data.draw(st.integers(0, n - 1))
    whole = joint_vector(dp, points, labels, None, num_classes)
    less = joint_vector(dp, points[rest], labels[rest], None, num_classes)
    assert bool(whole.isfinite().all())
    assert float((whole - less).norm()) <= dp.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("rows", [1, 7, 1023, 1024, 1025, 3000])
def test_what_is_made_of_a_row_has_the_same_bits_however_many_others_there_are(rows):
    """Else weights that make last bits large would make one row change all others."""
    points = torch.randn(3000, 37, generator=generator(0, "points"), dtype=torch.float64)
    matrix = torch.randn(37, 11, generator=generator(0, "matrix"), dtype=torch.float64)
    assert torch.equal(multiply_in_batches(points[:rows], matrix), multiply_in_batches(points, matrix)[:rows])


@pytest.mark.parametrize("subjects", [None, torch.arange(3), torch.tensor([0, 1, -1, 2])], ids=["no", "few", "some"])
def test_rows_without_a_subject_are_refused_where_subjects_are_protected(subjects):
    rows = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(DataError, match="no subject id"):
        joint_vector(_dp(unit="subject"), *rows, subjects, 2)
    joint_vector(_dp(), *rows, subjects, 2)  # as records they need none


# --- settings


@many
@given(st.floats(0.01, 1e4), st.floats(1e-12, 1e-5), weights, weights)
def test_noise_is_the_sensitivity_times_that_of_dp_accounting(epsilon, delta, count, spread):
    dp = DP(epsilon, delta, clip="unit", count_weight=count, spread_weight=spread)
    assert dp.sensitivity == pytest.approx(math.sqrt(1 + count**2 + spread**2))
    assert dp.sigma == pytest.approx(dp.sensitivity * get_sigma_gaussian(epsilon, delta, tol=1e-300), rel=1e-6)


def test_replayable_noise_says_that_it_protects_nothing():
    real, replayable = DP(1.0, clip="unit"), DP(1.0, clip="unit", replay_seed=0)
    assert not real.is_replayable
    assert replayable.is_replayable
    for told in (str(replayable), replayable.mechanism):
        assert "TEST MODE" in told
        assert "NO PRIVACY" in told
    assert "TEST" not in str(real)
    assert str(real) == "(ε = 1, δ = 1e-05)-DP for one record"
    assert "one subject" in str(DP(1.0, clip="unit", unit="subject"))


NUMBERS = st.sampled_from([NAN, INF, -INF, 0, 0.0, -1, -1.0, True, None, "1", [1]])
WRONG = {
    "epsilon": NUMBERS | st.just(1e6 + 1),
    "delta": NUMBERS | st.sampled_from([1.0, 7, 1.1e-5]),
    "clip": NUMBERS | st.just(10**400),
    "erase_clip": NUMBERS.filter(lambda value: value is not None) | st.just(10**400),
    "unit": st.sampled_from(["client", None]),
    "projection": st.just("pca"),
    "cells": NUMBERS | st.sampled_from([0.5, 4097]),
    "dims": NUMBERS | st.sampled_from([0.5, 4097]),
    "count_weight": NUMBERS | st.sampled_from([9e-7, 1.1e6]),
    "spread_weight": NUMBERS | st.sampled_from([9e-7, 1.1e6]),
}


@pytest.mark.parametrize("name", WRONG)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_setting_out_of_range_is_refused_by_its_name(name, data):
    value = data.draw(WRONG[name])
    with pytest.raises(SettingError, match=name):
        DP(**{"epsilon": 1.0, "clip": 1.0, name: value})


def test_settings_at_the_ends_of_their_ranges_are_taken_and_a_large_delta_from_those_who_mean_it():
    DP(1e6, 1e-5, clip=5e-324, cells=4096, dims=1, count_weight=1e-6, spread_weight=1e6, erase_clip=1e308)
    assert DP(1.0, 1e-3, clip=1.0, allow_delta=True).delta == 1e-3
    for more in ({"delta": 1.0, "allow_delta": True}, {"erase_clip": 1.0, "unit": "subject"}, {"clip": None}):
        with pytest.raises(SettingError):
            DP(**{"epsilon": 1.0, "clip": 1.0, **more})
