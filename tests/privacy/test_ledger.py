"""The ledger: releases add up as dp-accounting adds them, and none passes a budget."""

import json
import math

import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedup.errors import ArtifactError, BudgetError
from fedup.privacy import DP, Budget, Charge, Ledger

INF, NAN = float("inf"), float("nan")
DELTA = 1e-5
many = settings(max_examples=40, deadline=None, derandomize=True)
epsilons = st.floats(-2, 2).map(lambda exponent: 10.0**exponent)
deltas = st.sampled_from([1e-5, 1e-6, 1e-9])
guarantees = st.builds(lambda epsilon, delta: DP(epsilon, delta, clip="unit"), epsilons, deltas)
spends = st.lists(st.tuples(st.integers(0, 2), guarantees), max_size=8)


def _dp(epsilon=1.0, delta=DELTA):
    return DP(epsilon, delta, clip="unit")


def _noise(dp):
    """Over the sensitivity, by dp-accounting."""
    return get_sigma_gaussian(dp.epsilon, dp.delta, tol=1e-300)


@many
@given(spends, deltas)
def test_what_is_spent_is_what_dp_accounting_makes_of_the_releases(spent, delta):
    ledger = Ledger()
    for client, dp in spent:
        ledger.spend(client, dp, "centroids")
    assert ledger.clients == sorted({client for client, _ in spent})
    for client in ledger.clients:
        precision = sum(_noise(dp) ** -2 for of, dp in spent if of == client)
        expected = get_epsilon_gaussian(precision**-0.5, delta, tol=1e-300)
        assert ledger.epsilon(client, delta) == pytest.approx(expected, rel=1e-6, abs=1e-300)
        assert ledger.mu(client) == pytest.approx(math.sqrt(precision), rel=1e-6)


@many
@given(st.lists(guarantees, min_size=1, max_size=8), epsilons, deltas)
def test_a_release_is_refused_exactly_where_it_would_pass_the_budget(releases, epsilon, delta):
    ledger, spent = Ledger(budgets={None: Budget(epsilon, delta)}), 0.0
    for dp in releases:
        after = spent + _noise(dp) ** -2
        allowed = get_sigma_gaussian(epsilon, delta, tol=1e-300) ** -2
        assume(abs(after / allowed - 1) > 1e-5)
        before = ledger.to_json()
        if after <= allowed:
            ledger.check([0], dp)
            ledger.spend(0, dp, "centroids")
            spent = after
            assert ledger.epsilon(0, delta) <= epsilon * (1 + 1e-9)
        else:
            for ask in (lambda dp=dp: ledger.check([0], dp), lambda dp=dp: ledger.spend(0, dp, "centroids")):
                with pytest.raises(BudgetError):
                    ask()
            assert ledger.to_json() == before
            assert ledger.mu(0) ** 2 == pytest.approx(spent, rel=1e-6)


def test_a_budget_of_its_own_goes_before_that_of_all():
    ledger = Ledger(budgets={None: Budget(1.0), 1: Budget(4.0), 2: Budget(0.5)})
    assert [ledger.budget(client).epsilon for client in (0, 1, 2)] == [1.0, 4.0, 0.5]
    ledger.spend(1, _dp(3.0), "centroids")
    ledger.spend(0, _dp(1.0), "centroids")
    for client, epsilon in ((0, 0.1), (2, 0.6), (1, 3.0)):
        with pytest.raises(BudgetError, match=f"Client {client}"):
            ledger.spend(client, _dp(epsilon), "centroids")
    assert ledger.clients == [0, 1, 2]


@many
@given(epsilons, deltas, st.integers(1, 4), guarantees)
def test_a_client_named_several_times_must_afford_as_many_releases(epsilon, delta, times, dp):
    budget = Budget(epsilon, delta)
    assume(abs(times * dp.mu**2 / budget.mu**2 - 1) > 1e-5)
    ledger = Ledger(budgets={0: budget})
    if times * dp.mu**2 < budget.mu**2:
        ledger.check([1] * 9 + [0] * times, dp)
        for _ in range(times):
            ledger.spend(0, dp, "centroids")
    else:
        with pytest.raises(BudgetError, match="Client 0"):
            ledger.check([1] * 9 + [0] * times, dp)


@many
@given(spends, st.dictionaries(st.none() | st.integers(0, 3), st.builds(Budget, st.floats(200, 1e5), deltas)))
def test_a_ledger_comes_back_from_its_text(spent, budgets):
    ledger = Ledger([Charge(client, dp.mu, "centroids", str(dp)) for client, dp in spent], budgets)
    back = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert (back.charges, back.budgets, back.clients) == (ledger.charges, ledger.budgets, ledger.clients)
    for client in range(4):
        assert back.mu(client) == ledger.mu(client)
        assert back.left(client) == ledger.left(client)


def _told():
    ledger = Ledger(budgets={None: Budget(3.0), 1: Budget(5.0)})
    ledger.spend(0, _dp(), "centroids")
    ledger.spend(1, _dp(), "centroids")
    return json.loads(json.dumps(ledger.to_json()))


def test_a_release_with_a_name_is_charged_once_also_by_a_ledger_that_was_read_back():
    dp = DP(1.0, clip=1.0)
    ledger = Ledger(budgets={None: Budget(1.0)})
    ledger.spend(0, dp, "centroids", "a")
    ledger.spend(0, dp, "centroids", "a")  # which the budget would not allow twice
    again = Ledger.from_json(ledger.to_json())
    again.spend(0, dp, "centroids", "a")
    assert len(ledger.charges) == len(again.charges) == 1
    with pytest.raises(BudgetError):
        again.spend(0, dp, "centroids", "b")
    ledger.spend(1, dp, "centroids", "a")  # another client's is another
    assert len(ledger.charges) == 2


def test_a_release_is_charged_once_whatever_it_is_called_and_two_are_charged_twice():
    ledger = Ledger()
    for release in ("one", "one", "other"):
        ledger.came(0, _dp(), "centroids", release)
    ledger.came(1, _dp(), "centroids", "one")  # of another client
    assert [(charge.client, charge.release) for charge in ledger.charges] == [(0, "one"), (0, "other"), (1, "one")]


@many
@given(st.lists(st.tuples(guarantees, st.booleans()), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_ledger_follows_the_clients_own_account_whatever_is_lost_and_comes_later(releases, shuffling):
    """Some releases are lost and come in any order at the end; the client tells what it has spent each time."""
    ledger, spent, late = Ledger(), 0.0, []
    for i, (dp, lost) in enumerate(releases):
        spent += dp.mu**2
        if lost:
            late.append((dp, str(i)))
        else:
            ledger.came(0, dp, "centroids", str(i), reported=spent)
            assert ledger.spent(0) == pytest.approx(spent, rel=1e-9)
    for dp, name in shuffling.sample(late, len(late)):
        ledger.came(0, dp, "centroids", name, reported=spent)
        assert ledger.spent(0) == pytest.approx(spent, rel=1e-8)
    assert Ledger.from_json(ledger.to_json()).spent(0) == pytest.approx(spent, rel=1e-8)
    assert len([charge for charge in ledger.charges if charge.release]) == len(releases)


def test_an_account_is_never_lowered():
    ledger = Ledger()
    ledger.came(0, _dp(), "centroids", "one")
    for told in (0.0, 0.5 * _dp().mu ** 2, _dp().mu ** 2):
        ledger.correct(0, told, "it says so")
    ledger.came(0, _dp(), "centroids", "two", reported=0.0)  # whoever tells too little is charged all the same
    assert ledger.spent(0) == pytest.approx(2 * _dp().mu ** 2)
    assert not any(charge.correction for charge in ledger.charges)


def test_no_budget_allows_noise_that_can_be_replayed():
    replayable = DP(0.01, clip="unit", replay_seed=0)
    ledger = Ledger(budgets={0: Budget(100.0)})
    for ask in (lambda: ledger.check([0], replayable), lambda: ledger.spend(0, replayable, "centroids")):
        with pytest.raises(BudgetError, match="noise that can be replayed protects nothing"):
            ask()
    ledger.spend(1, replayable, "centroids")  # who has no budget is not limited
    assert [charge.replayable for charge in ledger.charges] == [True]


ODD = [None, "1", -1.0, NAN, INF, True, [], {}, 3]
PARTS = [("charges",), ("budgets",), ("charges", 0), ("budgets", 0), ("budgets", 0, 1)]
FIELDS = [*(("charges", 0, name) for name in ("client", "mu", "covered", "replayable", "correction"))]
FIELDS += [("budgets", 0, 1, "epsilon"), ("budgets", 0, 1, "delta"), ("budgets", 1, 0)]


@many
@given(st.sampled_from(PARTS + FIELDS), st.sampled_from([*ODD, "missing", "more", "twice"]))
@example(("budgets",), "twice")  # two budgets of one client, of which the second would count
@example(("charges", 0, "client"), "1")
@example(("charges", 0, "client"), -1)
@example(("charges", 0, "client"), 2**64)
def test_a_ledger_that_was_edited_is_refused_or_charges_no_less(path, damage):
    plain = _told()
    before = Ledger.from_json(plain)
    *inner, last = path
    place = plain
    for key in inner:
        place = place[key]
    if damage == "missing":
        del place[last]
    elif damage == "more":
        place[last] = {**place[last], "more": 1} if isinstance(place[last], dict) else [place[last], 1]
    elif damage == "twice":
        place[last] = place[last] * 2 if isinstance(place[last], list) else [place[last]] * 2
    else:
        place[last] = damage
    try:
        after = Ledger.from_json(plain)
    except ArtifactError:
        return
    assert all(type(charge.client) is int and 0 <= charge.mu < INF for charge in after.charges)
    assert all(type(client) in (int, type(None)) for client in after.budgets)
    assert damage in ("twice", "missing", 3, True, None, [], {}) or after == before, (path, damage)
