"""Intervals against closed forms, brute force, and how often they hold."""

import math

import numpy as np
import pytest

from fedup.bench.attacks.intervals import NORMAL, auc, clopper_pearson, tpr_at_fpr


def test_ends_that_have_a_closed_form():
    for n in (1, 10, 1000):
        assert clopper_pearson(0, n, 0.9) == (0.0, pytest.approx(1 - 0.05 ** (1 / n)))
        assert clopper_pearson(n, n, 0.9) == (pytest.approx(0.05 ** (1 / n)), 1.0)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_interval_holds_as_often_as_it_says_whatever_the_rate(rate):
    n = 30
    chance = [math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1)]
    ends = [clopper_pearson(k, n) for k in range(n + 1)]
    held = sum(p for p, (low, high) in zip(chance, ends, strict=True) if low <= rate <= high)
    assert held >= 0.95


def test_the_area_counts_pairs_and_half_of_ties_and_groups_that_do_not_overlap_have_an_interval_too():
    draw = np.random.default_rng(0)
    members, others = draw.integers(0, 6, 40).astype(float) + 1, draw.integers(0, 6, 30).astype(float)
    pairs = np.sign(members[:, None] - others) / 2 + 0.5
    figure, low, high = auc(members, others)
    assert figure == pytest.approx(pairs.mean())
    assert low < figure < high
    assert auc(np.arange(10, 30.0), np.arange(8.0)) == (1.0, pytest.approx(0.025 ** (1 / 8)), 1.0)


def test_intervals_of_the_area_and_of_the_rate_hold():
    draw, mu, runs = np.random.default_rng(1), 1.2, 200
    held_auc = held_tpr = 0
    for _ in range(runs):
        members, others = draw.normal(mu, 1, 200), draw.normal(0, 1, 400)
        _, low, high = auc(members, others)
        held_auc += low <= NORMAL.cdf(mu / math.sqrt(2)) <= high
        figure, low, high = tpr_at_fpr(members, others, 0.05)
        assert low <= figure <= high
        held_tpr += low <= NORMAL.cdf(mu + NORMAL.inv_cdf(0.05)) <= high
    assert 0.9 <= held_auc / runs < 1  # an interval that always holds says nothing
    assert held_tpr / runs >= 0.95


def test_too_few_others_leave_the_rate_open():
    _, low, _ = tpr_at_fpr(np.full(100, 5.0), np.zeros(50), 0.01)
    assert low == 0
    _, low, _ = tpr_at_fpr(np.full(100, 5.0), np.zeros(3000), 0.01)
    assert low > 0.9
