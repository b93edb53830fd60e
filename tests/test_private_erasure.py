"""Erasers from statistics under differential privacy."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests._forced import restore, unlearn
from tests._marked import state_of
from torch import nn

import fedup
from fedup import Budget, Federation, FilterConfig, Forget, Ledger, collect, iid, plug
from fedup.errors import BudgetError, HarmError, RequestError
from fedup.federation import Client
from fedup.privacy import DP
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import RowGroups
from fedup.statistics.private_erasure import NoisyGroupStatistics, PlannedStatistics
from fedup.statistics.private_features import blank_row

TEST_NOISE = DP(50.0, clip="unit", replay_seed=1)


class Net(nn.Module):
    """Maps before the cut at `conv`, so that an eraser acts on positions."""

    cuts = {"conv": "each", "head": "each"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 3, 1)
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4 * 25, 4)

    def forward(self, x):
        return self.head(self.conv(self.first(x)).relu().flatten(1))


def make_data(rows=900):
    source = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 4
    x = 0.5 * torch.randn(rows, 1, 6, 6, generator=source)
    x[torch.arange(rows), 0, 2, y] += 3
    return x, y


@pytest.fixture(scope="module")
def poisoned():
    """A federation whose client 1 has 200 rows with a bright corner and the label 0, and a model that learned that."""
    x, y = make_data(3000)
    parts = iid(y, 3)
    clients = Federation.split(x, y, parts).clients
    chosen = clients[1].train[:200]
    x[chosen, 0, 5, 5] = 4.0
    y[chosen] = 0
    federation = Federation(x, y, clients, 4)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = federation.rows("train")
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return federation, model.eval(), Forget.samples({1: chosen.tolist()})


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


def test_messages_add_up_over_clients(poisoned):
    federation, model, request = poisoned
    client = federation.clients[1]
    groups = RowGroups({"r": request}, request)
    halves = [replace(client, train=client.train[i::2]) for i in (0, 1)]
    sharp = replace(TEST_NOISE, epsilon=1e5)
    planned = PlannedStatistics(model, blank_row(federation.x), cut="conv", dp=sharp, num_classes=4)
    said = [planned.answer(ClientData(model, federation.x, federation.y, one, 4), groups) for one in (client, *halves)]
    whole, parts = NoisyGroupStatistics.of(sharp, said[:1]), NoisyGroupStatistics.of(sharp, said[1:])
    torch.testing.assert_close(parts.forgotten.mean, whole.forgotten.mean, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(parts.reference.mean, whole.reference.mean, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("epsilon", [50.0, 8.0])
def test_a_trigger_is_erased_at_its_place_and_the_rest_is_kept(poisoned, epsilon):
    federation, model, request = poisoned
    centroids = collect(model, federation, privacy=DP(epsilon, clip="unit", replay_seed=3))
    plugged = plug(model)
    x, y = triggered(federation)
    before = (model(x).argmax(1) == 0).float().mean()
    report = unlearn(plugged, centroids, request, clients=federation, config=FilterConfig(filter="erasure"))
    after = (plugged(x).argmax(1) == 0).float().mean()
    assert before > 0.9
    assert after < 0.1
    assert (plugged(x).argmax(1) == y).float().mean() > 0.85
    assert report.erasure["place"]["cut"] == "conv"
    assert report.erasure["place"]["positions"] <= 3
    assert [release.what for release in report.releases] == ["centroids", "statistics under DP"]
    restore(plugged, centroids, request, clients=federation)
    assert torch.equal(plugged.unplug()(x), model(x))


def test_an_eraser_that_nobody_can_check_is_refused_before_anybody_pays(poisoned):
    federation, model, request = poisoned
    store, plugged = collect(model, federation, privacy=DP(50.0, clip="unit", replay_seed=3)), plug(model)
    before, charged = state_of(store), len(store.ledger.charges)
    with pytest.raises(HarmError, match="nobody can be asked"):
        fedup.unlearn(plugged, store, request, clients=federation, config=FilterConfig(filter="erasure"))
    after = state_of(store)
    assert plugged.served is None
    assert len(store.ledger.charges) == charged
    assert after == before
    report = unlearn(plugged, store, request, clients=federation, config=FilterConfig(filter="erasure"))  # forced
    assert any("nobody can be asked" in reason for reason in report.forced)


def test_a_budget_for_one_of_two_releases_refuses_before_the_first(poisoned):
    federation, model, request = poisoned
    dp = DP(2.0, clip="unit")
    ledger = Ledger(budgets={None: Budget(3.0)})  # two releases of ε = 2 fit, three do not
    centroids = collect(model, federation, privacy=dp, ledger=ledger)
    before = centroids.vectors.clone()
    with pytest.raises(BudgetError, match="2 releases"):
        unlearn(plug(model), centroids, request, clients=federation, config=FilterConfig(filter="erasure"))
    assert len(ledger.charges) == 3
    assert torch.equal(centroids.vectors, before)


def test_asking_again_for_the_same_is_free(poisoned):
    federation, model, request = poisoned
    centroids = collect(model, federation, privacy=DP(8.0, clip="unit", replay_seed=3))
    plugged = plug(model)
    assert unlearn(plugged, centroids, request, clients=federation).erasure
    charged = len(centroids.ledger.charges)
    assert unlearn(plugged, centroids, Forget.clients([2]), clients=federation).erasure
    assert len(centroids.ledger.charges) == charged


def test_samples_that_do_not_stand_out_of_the_noise_get_no_eraser(poisoned):
    federation, model, _ = poisoned
    honest = Forget.samples({0: federation.clients[0].train[:100].tolist()})
    centroids = collect(model, federation, privacy=DP(1.0, clip="unit", replay_seed=3))
    report = unlearn(plug(model), centroids, honest, clients=federation)
    assert report.erasure is None
    assert any("no more than the noise" in note for note in report.notes)
    again = collect(model, federation, privacy=DP(1.0, clip="unit", replay_seed=3))
    with pytest.raises(RequestError, match="no more than the noise"):
        unlearn(plug(model), again, honest, clients=federation, config=FilterConfig(filter="erasure"))


@pytest.mark.parametrize(
    ("request_", "unit", "match"),
    [
        (Forget.classes([1]), "record", "only samples"),
        (Forget.clients([1]), "record", "only samples"),
        (None, "subject", "subjects"),
    ],
)
def test_what_cannot_be_erased_under_dp_is_refused_where_an_eraser_was_asked_for(poisoned, request_, unit, match):
    federation, model, samples = poisoned
    federation = federation.with_subjects(torch.arange(len(federation.y)))
    centroids = collect(model, federation, privacy=DP(8.0, clip="unit", unit=unit, replay_seed=3))
    with pytest.raises(RequestError, match=match):
        unlearn(plug(model), centroids, request_ or samples, clients=federation, config=FilterConfig(filter="erasure"))
