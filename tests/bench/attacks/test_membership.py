"""Membership: centroids tell members apart; under DP the best attack reaches its bound and not more."""

import math

import pytest
import torch
from tests.bench._progress import silent

from fedup.bench.attacks import CENTROIDS, guarantees
from fedup.bench.attacks import membership as module
from fedup.bench.attacks.canary import QuarterNoise
from fedup.bench.attacks.membership import CONTROL, INFORMED, NEAREST, auc_bound, membership, tpr_bound


@pytest.fixture(scope="module")
def results(ground):
    return membership(ground, trials=150, seed=1, progress=silent)


def found(results, name, protection, measure="AUC"):
    return next(r for r in results if (r.name, r.protection, r.measure) == (name, protection, measure))


@pytest.mark.parametrize("mu", [0.3, 1.5])
def test_the_bounds_are_those_of_the_likelihood_ratio_test(mu):
    source = torch.Generator().manual_seed(0)
    inside, outside = mu + torch.randn(200_000, generator=source), torch.randn(200_000, generator=source)
    assert float((inside > outside).float().mean()) == pytest.approx(auc_bound(mu), abs=0.005)
    threshold = outside.quantile(0.99)
    assert float((inside > threshold).float().mean()) == pytest.approx(tpr_bound(mu), abs=0.01)


def test_centroids_tell_members_apart_and_without_a_message_nothing_does(results):
    for protection in CENTROIDS:
        assert found(results, NEAREST, protection).low > 0.9
        assert found(results, NEAREST, protection, "TPR at 1% FPR").figure > 0.5
    control = found(results, NEAREST, CONTROL)
    assert control.low < 0.5 < control.high


def test_the_informed_attack_reaches_the_bound_of_every_guarantee_and_none_passes_it(results):
    for name, dp in guarantees().items():
        informed = found(results, INFORMED, name)
        assert informed.bound == pytest.approx(auc_bound(dp.mu))
        assert informed.low <= informed.bound <= informed.high  # vectors of norm 1: every record is the worst case
        assert found(results, NEAREST, name).figure < informed.bound + 0.05
    assert not any(result.exceeds for result in results)


def test_every_figure_says_what_it_counted(results):
    assert len(results) == 2 * (1 + len(CENTROIDS) + 2 * len(guarantees()))
    assert all(math.isfinite(result.figure) and result.low <= result.figure <= result.high for result in results)
    assert {result.n for result in results} == {"150 members, 150 others"}


def test_too_little_noise_is_seen(ground, monkeypatch):
    monkeypatch.setattr(module, "guarantees", lambda: {"broken": QuarterNoise(4.0, clip="unit")})
    broken = membership(ground, trials=150, progress=silent)
    assert found(broken, INFORMED, "broken").exceeds


def test_the_same_seed_gives_the_same_figures(ground, results, monkeypatch):
    monkeypatch.setattr(module, "guarantees", lambda: {"DP, ε = 8": guarantees()["DP, ε = 8"]})
    again = membership(ground, trials=150, seed=1, progress=silent)
    assert set(again) < set(results)
    assert not set(again) <= set(membership(ground, trials=150, seed=2, progress=silent))
