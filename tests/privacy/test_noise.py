"""Noise: of the stated scale, independent, and never twice the same unless a test asks for it."""

import math
import secrets

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from fedup.privacy import DP
from fedup.privacy.dp import normal, release

SEEDED = ("a test", 1)
few = settings(max_examples=20, deadline=None, derandomize=True)


def _off_normal(sample):
    """The largest distance of the sample's distribution function from that of the normal law."""
    return float(kstest(sample.numpy(), "norm").statistic)


def _moments_off(sample):
    """How many of their own deviations the first four moments are off by, as large samples have them."""
    n = len(sample)
    moments = [(sample**k).mean() for k in (1, 2, 3, 4)]
    truth, variance = (0, 1, 0, 3), (1, 2, 15, 96)
    return [abs(float(m) - t) / math.sqrt(v / n) for m, t, v in zip(moments, truth, variance, strict=True)]


# --- the numbers themselves


def test_numbers_of_the_systems_entropy_follow_the_normal_law():
    """By Dvoretzky, Kiefer, Wolfowitz and Massart the distance is larger than this once in 10¹² runs."""
    n = 200_000
    sample = normal(n)
    assert sample.dtype == torch.float64
    assert _off_normal(sample) < math.sqrt(math.log(2e12) / (2 * n))
    mean, variance = _moments_off(sample)[:2]
    assert mean < 8
    assert variance < 8


def test_a_wrong_law_would_be_noticed():
    n = 200_000
    sample, bound = normal(n, replay=SEEDED), math.sqrt(math.log(2e12) / (2 * n))
    assert _off_normal(sample) < bound
    for wrong in (1.05 * sample, 0.95 * sample, sample + 0.03, sample.sign() * sample.abs() ** 1.1, sample.abs()):
        assert _off_normal(wrong) > bound


@pytest.mark.parametrize("replay", [None, SEEDED])
def test_one_number_tells_nothing_of_the_next(replay):
    n = 100_000
    sample = normal(n, replay=replay)
    for lag in (1, 2, 3, n // 2):  # halves: a number and the one made of the same position in the other half
        assert abs(float((sample[lag:] * sample[:-lag]).mean())) < 8 / math.sqrt(n - lag)
        assert abs(float((sample[lag:].square() * sample[:-lag].square()).mean()) - 1) < 8 * math.sqrt(8 / (n - lag))
    assert len(sample.unique()) > n - 5


@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"\x80"])
def test_the_ends_of_the_entropy_give_finite_numbers(byte, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda size: byte * size)
    assert normal(4).isfinite().all()


# --- a release


@few
@given(st.floats(0.05, 100), st.floats(0.1, 5), st.floats(0.1, 5))
def test_noise_has_the_stated_deviation_on_every_number(epsilon, count, spread):
    dp = DP(epsilon, clip=3.0, count_weight=count, spread_weight=spread, replay_seed=5)
    exact = torch.zeros(2000, 25, dtype=torch.float64)
    noise = release(dp, exact, name=("scale",)).double() / dp.sigma
    assert abs(float(noise.square().mean()) - 1) < 5 * math.sqrt(2 / noise.numel())
    assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel())
    by_column = noise.square().sum(0)  # χ² of 2000 each
    assert ((by_column - 2000).abs() < 5 * math.sqrt(2 * 2000)).all()


def test_two_releases_have_nothing_in_common_unless_they_are_replayed():
    exact = torch.zeros(50, 40, dtype=torch.float64)
    real, replayable = DP(1.0, clip="unit"), DP(1.0, clip="unit", replay_seed=1)
    one, other = (release(real, exact, name=("cells", 0)) for _ in range(2))
    assert (one == other).float().mean() < 0.01
    assert abs(float((one * other).mean())) < 8 * real.sigma**2 / math.sqrt(exact.numel())
    first = release(replayable, exact, name=("cells", 0))
    assert torch.equal(release(replayable, exact, name=("cells", 0)), first)
    assert not torch.equal(release(replayable, exact, name=("cells", 1)), first)
    assert not torch.equal(release(DP(1.0, clip="unit", replay_seed=2), exact, name=("cells", 0)), first)
