"""The accountant against Google's dp-accounting and against arithmetic of 60 digits."""

import math

import mpmath
import pytest
from dp_accounting import GaussianDpEvent, get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedup.errors import SettingError
from fedup.privacy import delta_of, epsilon_of, mu_of

INF, NAN = float("inf"), float("nan")
many = settings(max_examples=60, deadline=None, derandomize=True)
few = settings(max_examples=15, deadline=None, derandomize=True)


def _powers_of_ten(low, high):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


epsilons = _powers_of_ten(-5, 5)
deltas = _powers_of_ten(-12, -0.5) | _powers_of_ten(-290, -12)
mus = _powers_of_ten(-4, 2.5)
sigmas = st.lists(st.floats(0.3, 30), min_size=1, max_size=6)


def _exact_delta(mu, epsilon):
    """Balle & Wang 2018, theorem 8, where no digit is lost."""
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def _together(sigmas):
    return math.sqrt(sum(sigma**-2 for sigma in sigmas))


# --- one release


@many
@given(epsilons, deltas)
@example(1.0, 1e-5)
@example(1e5, 1e-5)
@example(1e-5, 1e-290)
def test_the_least_noise_is_that_of_dp_accounting(epsilon, delta):
    expected = get_sigma_gaussian(epsilon, delta, tol=1e-300)
    assert 1 / mu_of(epsilon, delta) == pytest.approx(expected, rel=1e-6)


@many
@given(mus, deltas)
def test_the_epsilon_of_a_release_is_that_of_dp_accounting(mu, delta):
    expected = get_epsilon_gaussian(1 / mu, delta, tol=1e-300)
    assert epsilon_of(mu, delta) == pytest.approx(expected, rel=1e-6, abs=1e-300)


@many
@given(mus, st.just(0.0) | _powers_of_ten(-4, 4))
def test_delta_is_that_of_the_formula_to_the_last_digits(mu, epsilon):
    expected = _exact_delta(mu, epsilon)
    assume(expected > 1e-300)
    assert delta_of(mu, epsilon) == pytest.approx(float(expected), rel=1e-6)


@many
@given(mus, deltas)
def test_there_and_back_gives_the_same_mu(mu, delta):
    epsilon = epsilon_of(mu, delta)
    assume(1e-6 < epsilon < 1e6)
    assert mu_of(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    assert delta_of(mu, epsilon) == pytest.approx(delta, rel=1e-6)


# --- order


@many
@given(mus, _powers_of_ten(-3, 3), st.floats(1.001, 100))
def test_delta_falls_with_epsilon_and_grows_with_mu(mu, epsilon, factor):
    delta = delta_of(mu, epsilon)
    assert 0 <= delta_of(mu, epsilon * factor) <= delta <= delta_of(mu * factor, epsilon) <= 1
    assert delta <= delta_of(mu, 0.0)


# --- several releases


@few
@given(st.lists(st.floats(0.6, 20), min_size=2, max_size=5), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_composition_is_within_what_dp_accounting_finds_release_by_release(sigmas, delta):
    """Both of its accountants compose without knowing our rule and round up; privacy-loss distributions hardly do."""
    loss, renyi = PLDAccountant(value_discretization_interval=1e-3), RdpAccountant()
    for sigma in sigmas:
        loss.compose(GaussianDpEvent(sigma))
        renyi.compose(GaussianDpEvent(sigma))
    found = epsilon_of(_together(sigmas), delta)
    assert loss.get_epsilon(delta) * (1 - 1e-3) - 1e-4 <= found <= loss.get_epsilon(delta) + 1e-9
    assert found <= renyi.get_epsilon(delta)


# --- far out


@pytest.mark.parametrize("mu", [1e-6, 1e-2, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-5, 0.5])
def test_epsilon_is_right_however_far_out(mu, delta):
    epsilon = epsilon_of(mu, delta)
    assert 0 <= epsilon < 1e13
    assert _exact_delta(mu, epsilon * (1 + 1e-6)) <= delta
    assert epsilon == 0 or _exact_delta(mu, epsilon * (1 - 1e-6)) > delta


def test_nothing_released_costs_nothing_and_exact_values_cost_everything():
    assert epsilon_of(0.0, 1e-5) == delta_of(0.0, 1.0) == 0
    assert epsilon_of(INF, 1e-5) == INF
    assert delta_of(INF, 1.0) == 1
    assert epsilon_of(1e-6, 1e-5) == 0  # δ alone covers it
    assert delta_of(1.0, 1e5) == 0
    assert delta_of(1e3, 0.0) == 1


# --- refused


@few
@given(st.sampled_from([0.0, -1e-5, 1.0, 2.0, NAN, INF]), st.sampled_from([0.0, -1.0, NAN, INF, 1e6 + 1]))
def test_what_is_no_delta_epsilon_or_mu_is_refused(delta, epsilon):
    for ask in (lambda: mu_of(1.0, delta), lambda: epsilon_of(1.0, delta)):
        with pytest.raises(SettingError, match="strictly between 0 and 1"):
            ask()
    with pytest.raises(SettingError, match="above 0 and at most 1000000"):
        mu_of(epsilon, 1e-5)
    for mu in (-1.0, NAN):
        for ask in (lambda mu=mu: delta_of(mu, 1.0), lambda mu=mu: epsilon_of(mu, 1e-5)):
            with pytest.raises(SettingError, match="must be 0 or more"):
                ask()
    assert mu_of(1e6, 1e-5) > 0
