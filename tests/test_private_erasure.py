"""Erasers from statistics under differential privacy."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._forced import restore, unlearn
from tests._marked import state_of
from tests._poisoned import Net, make_data, poisoned

import fedup
from fedup import Budget, FilterConfig, Forget, Ledger, collect, plug
from fedup.errors import BudgetError, HarmError, RequestError
from fedup.federation import Client
from fedup.privacy import DP
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.private_erasure import NoisyGroupStatistics, PlannedStatistics
from fedup.statistics.private_features import blank_row

TEST_NOISE = DP(50.0, clip="unit", replay_seed=1)
FEDERATION, MODEL, ROWS = poisoned()
REQUEST = Forget.samples({1: ROWS.tolist()})


def triggered(federation):
    """Held-out rows of other classes with the corner: all should be called what they are."""
    rows = federation.rows("heldout")
    rows = rows[federation.y[rows] != 0]
    x = federation.x[rows].clone()
    x[:, 0, 5, 5] = 4.0
    return x, federation.y[rows]


def statistics_of(model, x, y, train, samples, dp):
    client = Client(0, train=train, validation=train[:0], heldout=train[:0])
    request = Forget.samples({0: samples}) if samples else Forget.samples({0: [int(train[0])]})
    planned = PlannedStatistics(model, blank_row(x), cut="conv", dp=dp, num_classes=4)
    return planned.answer(ClientData(model, x, y, client, 4), RowGroups({"r": request}, request))


def joined(message):
    return torch.cat([message.sums.flatten(), message.counts]).double()


@settings(max_examples=25, deadline=None)
@given(
    gone=st.integers(0, 39),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e38, float("inf"), float("nan")]),
    clip=st.sampled_from([None, 0.5, 1e4]),
    weights=st.sampled_from([(0.5, 1.0), (2.0, 0.1)]),
)
def test_one_record_moves_the_message_by_at_most_the_sensitivity(gone, scale, clip, weights):
    # The noise of both messages is the same, so their difference is that of the exact statistics.
    x, y = make_data(40)
    x[gone] *= scale
    dp = replace(TEST_NOISE, erase_clip=clip, count_weight=weights[0], spread_weight=weights[1])
    model, train = Net(), torch.arange(40)
    samples = list(range(10))
    rest = train[train != gone]
    with_it = statistics_of(model, x, y, train, samples, dp)
    without = statistics_of(model, x, y, rest, [i for i in samples if i != gone], dp)
    assert with_it.clip == without.clip
    moved = float((joined(with_it) - joined(without)).norm())
    assert 0 < moved <= dp.sensitivity * (1 + 1e-4)


def test_the_bound_is_reached_by_a_record_with_all_its_length_in_one_channel():
    x, y = torch.zeros(30, 1, 6, 6), torch.arange(30) % 4
    x[7, 0, 0, 0] = 1e6
    model = Net()
    model.first.bias.data.zero_()
    model.first.weight.data.zero_()
    model.first.weight.data[0] = 1.0
    train = torch.arange(30)
    messages = [statistics_of(model, x, y, rows, [0, 1], TEST_NOISE) for rows in (train, train[train != 7])]
    moved = float((joined(messages[0]) - joined(messages[1])).norm())
    assert moved == pytest.approx(TEST_NOISE.sensitivity, rel=1e-3)


def test_messages_add_up_over_clients():
    client = FEDERATION.clients[1]
    groups = RowGroups({"r": REQUEST}, REQUEST)
    halves = [replace(client, train=client.train[i::2]) for i in (0, 1)]
    sharp = replace(TEST_NOISE, epsilon=1e5)
    planned = PlannedStatistics(MODEL, blank_row(FEDERATION.x), cut="conv", dp=sharp, num_classes=4)
    said = [planned.answer(ClientData(MODEL, FEDERATION.x, FEDERATION.y, one, 4), groups) for one in (client, *halves)]
    whole, parts = NoisyGroupStatistics.of(sharp, said[:1]), NoisyGroupStatistics.of(sharp, said[1:])
    torch.testing.assert_close(parts.forgotten.mean, whole.forgotten.mean, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(parts.reference.mean, whole.reference.mean, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("epsilon", [50.0, 8.0])
def test_a_trigger_is_erased_at_its_place_and_the_rest_is_kept(epsilon):
    centroids = collect(MODEL, FEDERATION, privacy=DP(epsilon, clip="unit", replay_seed=3))
    plugged = plug(MODEL)
    x, y = triggered(FEDERATION)
    before = (MODEL(x).argmax(1) == 0).float().mean()
    report = unlearn(plugged, centroids, REQUEST, clients=FEDERATION, config=FilterConfig(filter="erasure"))
    after = (plugged(x).argmax(1) == 0).float().mean()
    assert before > 0.9
    assert after < 0.1
    assert (plugged(x).argmax(1) == y).float().mean() > 0.85
    assert report.erasure["place"]["cut"] == "conv" and report.erasure["place"]["positions"] <= 3
    assert [release.what for release in report.releases] == ["centroids", "statistics under DP"]
    paid = [(charge.client, charge.what) for charge in centroids.ledger.charges[3:]]
    assert paid == [(1, "centroids"), (1, "eraser")]
    assert "TEST MODE" in report.erasure["mechanism"]
    restore(plugged, centroids, REQUEST, clients=FEDERATION)
    assert torch.equal(plugged.unplug()(x), MODEL(x))


def test_an_eraser_that_nobody_can_check_is_refused_before_anybody_pays():
    store, plugged = collect(MODEL, FEDERATION, privacy=DP(50.0, clip="unit", replay_seed=3)), plug(MODEL)
    before, charged = state_of(store), len(store.ledger.charges)
    with pytest.raises(HarmError, match="nobody can be asked"):
        fedup.unlearn(plugged, store, REQUEST, clients=FEDERATION, config=FilterConfig(filter="erasure"))
    after = state_of(store)
    assert plugged.served is None
    assert len(store.ledger.charges) == charged
    assert after == before
    report = unlearn(plugged, store, REQUEST, clients=FEDERATION, config=FilterConfig(filter="erasure"))  # forced
    assert any("nobody can be asked" in reason for reason in report.forced)


def test_a_budget_for_one_of_two_releases_refuses_before_the_first():
    dp = DP(2.0, clip="unit")
    ledger = Ledger(budgets={None: Budget(3.0)})  # two releases of ε = 2 fit, three do not
    centroids = collect(MODEL, FEDERATION, privacy=dp, ledger=ledger)
    before = centroids.vectors.clone()
    with pytest.raises(BudgetError, match="2 releases"):
        unlearn(plug(MODEL), centroids, REQUEST, clients=FEDERATION, config=FilterConfig(filter="erasure"))
    assert len(ledger.charges) == 3
    assert torch.equal(centroids.vectors, before)


def test_asking_again_for_the_same_is_free():
    centroids = collect(MODEL, FEDERATION, privacy=DP(8.0, clip="unit", replay_seed=3))
    plugged = plug(MODEL)
    assert unlearn(plugged, centroids, REQUEST, clients=FEDERATION).erasure
    charged = len(centroids.ledger.charges)
    assert unlearn(plugged, centroids, Forget.clients([2]), clients=FEDERATION).erasure
    assert len(centroids.ledger.charges) == charged


def test_samples_that_do_not_stand_out_of_the_noise_get_no_eraser():
    honest = Forget.samples({0: FEDERATION.clients[0].train[:100].tolist()})
    centroids = collect(MODEL, FEDERATION, privacy=DP(1.0, clip="unit", replay_seed=3))
    report = unlearn(plug(MODEL), centroids, honest, clients=FEDERATION)
    assert report.erasure is None and any("no more than the noise" in note for note in report.notes)
    again = collect(MODEL, FEDERATION, privacy=DP(1.0, clip="unit", replay_seed=3))
    with pytest.raises(RequestError, match="no more than the noise"):
        unlearn(plug(MODEL), again, honest, clients=FEDERATION, config=FilterConfig(filter="erasure"))


@pytest.mark.parametrize(
    ("request_", "unit", "match"),
    [
        (Forget.classes([1]), "record", "only samples"),
        (Forget.clients([1]), "record", "only samples"),
        (None, "subject", "subjects"),
    ],
)
def test_what_cannot_be_erased_under_dp_is_refused_where_an_eraser_was_asked_for(request_, unit, match):
    federation = FEDERATION.with_subjects(torch.arange(len(FEDERATION.y)))
    centroids = collect(MODEL, federation, privacy=DP(8.0, clip="unit", unit=unit, replay_seed=3))
    with pytest.raises(RequestError, match=match):
        unlearn(plug(MODEL), centroids, request_ or REQUEST, clients=federation, config=FilterConfig(filter="erasure"))
