"""The audit: silent about sound claims, loud about broken ones, and honest about what so many trials can show."""

import secrets

import numpy as np
import pytest
from tests.bench._progress import silent

from fedup.bench.attacks.canary import (
    COUNTED,
    PROVED,
    QuarterNoise,
    Rates,
    audit_paper,
    ceiling,
    guarded_worlds,
    lower_bound,
)
from fedup.privacy import DP

DELTA = 1e-5


def counted(rates: Rates) -> float:
    return rates.epsilon(DELTA)


def gaussian(rates: Rates) -> float:
    return rates.gaussian(DELTA)


@pytest.mark.parametrize(("epsilon", "seed"), [(8.0, None), (1.0, 0)], ids=["as deployed", "replayed"])
def test_a_sound_guarantee_is_never_refuted(ground, monkeypatch, epsilon, seed):
    monkeypatch.setattr(secrets, "token_bytes", np.random.default_rng(0).bytes)  # the same "entropy" each time
    inside, outside = guarded_worlds(ground, DP(epsilon, clip="unit"), trials=1200, seed=seed)
    assert lower_bound(inside, outside, counted) <= epsilon
    assert lower_bound(inside, outside, gaussian) <= epsilon
    if epsilon == 8:  # and the audit is not idle
        assert lower_bound(inside, outside, counted) > 1
        assert lower_bound(inside, outside, gaussian) > 4
        assert len({*inside, *outside}) == 2400  # noise of its own in every trial


def test_a_quarter_of_the_noise_is_found_out(ground):
    inside, outside = guarded_worlds(ground, QuarterNoise(1.0, clip="unit"), trials=2500, seed=0)
    assert lower_bound(inside, outside, counted) > 1.0
    assert lower_bound(inside, outside, gaussian) > 3.0


def test_the_worlds_differ_by_the_sensitivity_and_the_noise_is_as_told(ground):
    dp = DP(8.0, clip=3.0)
    inside, outside = guarded_worlds(ground, dp, trials=600, seed=1)
    assert inside.mean() - outside.mean() == pytest.approx(dp.sensitivity, abs=5 * dp.sigma / np.sqrt(300))
    assert outside.std() == pytest.approx(dp.sigma, rel=0.1)


def test_equal_worlds_need_no_epsilon_and_what_the_choice_saw_is_not_counted():
    inside, outside = np.random.default_rng(0).normal(size=(2, 4000))
    assert lower_bound(inside, outside, counted) == lower_bound(inside, outside, gaussian) == 0
    inside[:2000] += 10  # only where the threshold is chosen
    assert lower_bound(inside, outside, counted) == 0


def test_either_direction_is_enough_and_the_audit_of_gaussian_noise_is_nearly_tight():
    draw, dp = np.random.default_rng(0), DP(4.0, clip="unit")
    inside, outside = draw.uniform(0, 1, 4000), draw.uniform(-1, 1, 4000)  # below 0: surely without
    assert lower_bound(inside, outside, counted) > 3
    assert lower_bound(-outside, -inside, counted) == lower_bound(inside, outside, counted)
    inside, outside = draw.normal(dp.mu, 1, 100_000), draw.normal(0, 1, 100_000)
    assert 3.5 < lower_bound(inside, outside, gaussian) <= 4.0


def test_no_more_is_shown_than_the_trials_can():
    apart = np.arange(1000.0)
    shown = lower_bound(apart + 5000, apart, counted)
    most = ceiling(1000, counted)
    assert shown <= most < np.log(500)
    assert shown > most - 0.2
    assert ceiling(100_000, counted) > most + 4


def test_the_papers_formula_claims_less_than_its_noise_gives(ground):
    results = audit_paper(ground, trials=200, progress=silent)
    for_one = next(r for r in results if r.protection.endswith("ε = 1"))
    assert for_one.measure == COUNTED
    assert for_one.bound == pytest.approx(1.0)
    assert for_one.exceeds
    published = {r.measure: r for r in results if r.protection == "paper, σ = 0.001"}
    assert published[PROVED].bound > 10
    assert published[PROVED].exceeds
    assert not published[COUNTED].exceeds  # hundreds of trials cannot show so much
    assert all("replaced" in r.note for r in results)
