"""Requests under differential privacy: answered from releases alone, each of which is paid for once."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from tests._forced import restore, unlearn
from tests._marked import state_of
from tests._private_requests import (
    AUTO,
    CLASSES,
    CLIENTS,
    CONFIG,
    CUT,
    FAST,
    PRIVATE,
    SETTING,
    WIDTH,
    Strict,
    Unreachable,
    bits_of,
    payers_of,
    uncharged,
)

from fedup import (
    Federation,
    Forget,
    collect,
    plug,
)
from fedup.clients.in_process import InProcess
from fedup.errors import BudgetError, ContactError, FedUPError, RequestError, SettingError
from fedup.models.cut import tail_of
from fedup.privacy import DP, Budget, Ledger
from fedup.privacy.projection import basis_of
from fedup.request import union

# --- what is forgotten and what is kept


@pytest.mark.parametrize(
    ("epsilon", "clip", "options"),
    [(1.0, "unit", {}), (8.0, "unit", {"projection": "random", "dims": 12}), (1.0, 10.0, {"cells": 2})],
    ids=str,
)
def test_a_class_is_forgotten_and_others_are_kept(epsilon, clip, options):
    request = SETTING.requests["class"]
    store = SETTING.store(dp=DP(epsilon, clip=clip, replay_seed=0, **options))
    plugged, _ = SETTING.serving("class", store=store, config=CONFIG)
    gone, kept = (rows(request, "heldout") for rows in (SETTING.federation.forgotten, SETTING.federation.retained))
    assert SETTING.accuracy(SETTING.base, gone) > 0.95
    assert SETTING.accuracy(plugged, gone) == 0
    assert SETTING.accuracy(plugged, kept) > SETTING.accuracy(SETTING.base, kept) - 0.05


def test_a_client_is_left_out_and_the_others_knowledge_is_kept():
    request = SETTING.requests["client"]
    plugged, store = SETTING.serving("client", config=CONFIG)
    kept = SETTING.federation.retained(request, "heldout")
    assert SETTING.accuracy(plugged, kept) > SETTING.accuracy(SETTING.base, kept) - 0.05
    blank = copy.deepcopy(store)
    for cell in blank.cells:
        if cell.client == 3:
            blank.vectors[cell.slot] = torch.nan
    assert torch.equal(bits_of(SETTING.serving("client", store=blank, config=CONFIG)[0]), bits_of(plugged))


def test_samples_are_left_out_and_the_rest_is_kept():
    plugged, _ = SETTING.serving("sample", config=CONFIG)
    kept = SETTING.federation.retained(SETTING.requests["sample"], "heldout")
    assert SETTING.accuracy(plugged, kept) > SETTING.accuracy(SETTING.base, kept) - 0.05
    unreadable = SETTING.with_rows(SETTING.federation.forgotten(SETTING.requests["sample"]), torch.nan)
    again = plug(SETTING.base)
    unlearn(again, SETTING.store(), SETTING.requests["sample"], clients=unreadable, config=CONFIG)
    assert torch.equal(bits_of(again), bits_of(plugged))  # they are never read


def test_a_forgotten_class_can_be_relabelled():
    plugged, store = SETTING.serving("class", config=replace(CONFIG, class_policy="remap"))
    request = SETTING.requests["class"]
    gone, kept = (rows(request, "heldout") for rows in (SETTING.federation.forgotten, SETTING.federation.retained))
    assert SETTING.accuracy(plugged, gone) < 0.5
    assert SETTING.accuracy(plugged, kept) > 0.8
    with pytest.raises(SettingError, match="added up"):  # there are no clients left to relabel one by one
        unlearn(plug(SETTING.base), store, request, config=replace(CONFIG, class_policy="remap_client"))


# --- post-processing


@pytest.mark.parametrize("name", ["client", "class"])
def test_client_and_class_requests_are_answered_from_releases_alone(name):
    plugged, store = plug(SETTING.base), SETTING.store()
    before = state_of(store)
    report = unlearn(plugged, store, SETTING.requests[name], clients=Unreachable(store), config=FAST)
    assert state_of(store) == before
    assert (report.clients_contacted, report.bytes_up, report.bytes_down) == ([], 0, 0)
    assert torch.equal(bits_of(plugged), bits_of(SETTING.serving(name)[0]))


def test_the_order_of_requests_does_not_matter():
    one, other = SETTING.serving("class", "client"), SETTING.serving("client", "class")
    assert torch.equal(bits_of(one[0]), bits_of(other[0]))
    one, other = SETTING.serving("sample", "other samples"), SETTING.serving("other samples", "sample")
    assert torch.equal(bits_of(one[0]), bits_of(other[0]))  # as replayed noise is that of what is left out
    assert uncharged(state_of(one[1])) == uncharged(state_of(other[1]))


@pytest.mark.parametrize("options", [{}, {"projection": "random", "dims": 5}], ids=["tail", "random"])
def test_a_filter_lets_pass_only_what_lies_in_the_basis(options):
    dp = replace(PRIVATE, **options)
    plugged, _ = SETTING.serving("class", store=SETTING.store(dp=dp), config=CONFIG)
    basis = basis_of(SETTING.base, CUT, WIDTH, how=dp.projection, dims=dp.dims, num_classes=CLASSES)
    source = torch.Generator().manual_seed(0)
    beside = 10 * torch.randn(200, WIDTH, generator=source)
    beside -= beside @ basis @ basis.T
    tail = tail_of(SETTING.base, CUT)
    with torch.no_grad():
        features = SETTING.base[:2](SETTING.x[:200])
        answers, moved = (tail(plugged.served.filter(rows)) for rows in (features, features + beside))
        torch.testing.assert_close(plugged(SETTING.x[:200]), answers)
        torch.testing.assert_close(moved, answers, atol=1e-3, rtol=1e-4)
        inside = tail(plugged.served.filter(features + 10 * basis.sum(1)))
    assert (inside - answers).abs().max() > 0.1, "premise: what lies in the basis does change them"


# --- samples


def test_a_sample_request_releases_all_cells_of_the_touched_client_again_and_charges_it_alone():
    plugged, store = plug(SETTING.base), SETTING.store()
    contact, before = Strict(store), SETTING.collected
    report = unlearn(plugged, store, SETTING.requests["sample"], clients=contact, config=FAST)
    excluded = SETTING.requests["sample"].sample_ids[1]
    assert contact.asked == [(1, frozenset(range(CLASSES)), excluded)]
    assert report.clients_contacted == [1]
    assert payers_of(store) == [1]
    assert store.ledger.mu(1) == pytest.approx(math.sqrt(2) * PRIVATE.mu)
    assert store.ledger.mu(0) == pytest.approx(PRIVATE.mu)
    for cell in store.cells:
        same = torch.equal(store.vectors[cell.slot], before.vectors[cell.slot])
        assert same == (cell.client != 1)
        assert store.excluded.get(cell.name, frozenset()) == (excluded if cell.client == 1 else frozenset())
    assert report.bytes_up == store.size_bytes - before.size_bytes > 0
    assert store.sample_labels == {}


def test_noise_of_a_second_release_is_fresh():
    """Else the difference of the two would tell of the samples."""
    wide = replace(PRIVATE, projection="none", cells=5)
    clear = replace(wide, epsilon=1e5)  # to take off what is exact
    own, noise = torch.tensor([cell.client == 1 for cell in SETTING.collected.cells]), []
    stores = [SETTING.store(dp=dp) for dp in (wide, clear)]
    for names in ([], ["sample"]):
        noisy, exact = (SETTING.serving(*names, store=store)[1].vectors[own].flatten() for store in stores)
        noise.append((noisy - exact) / PRIVATE.sigma)
    n = len(noise[0])
    for one in noise:
        assert abs(float(one.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 5 / math.sqrt(n)
    real = SETTING.store(dp=replace(PRIVATE, replay_seed=None))
    first = real.vectors.clone()
    SETTING.serving("sample", store=real)
    assert not torch.equal(real.vectors[own], first[own])
    assert torch.equal(real.vectors[~own], first[~own])


def test_what_is_left_out_already_is_not_released_again():
    plugged, store = SETTING.serving("sample")
    unlearn(plugged, store, SETTING.requests["class"], clients=Unreachable(store))
    unlearn(plugged, store, SETTING.requests["client"], clients=Unreachable(store))
    assert payers_of(store) == [1]
    collected = collect(
        SETTING.base, SETTING.federation, privacy=PRIVATE, forget=[SETTING.requests["sample"]], ledger=Ledger()
    )
    unlearn(plug(SETTING.base), collected, SETTING.requests["sample"], clients=Unreachable(collected), config=FAST)
    assert payers_of(collected) == []


def test_a_sample_request_needs_a_way_to_reach_the_client():
    plugged, store = plug(SETTING.base), SETTING.store()
    with pytest.raises(ContactError):
        unlearn(plugged, store, SETTING.requests["sample"], config=FAST)
    assert state_of(store) == state_of(SETTING.collected)


def test_an_unknown_sample_is_refused_and_nothing_is_charged():
    store, foreign = SETTING.store(), SETTING.federation.client(0).train[:1]
    with pytest.raises(RequestError, match="not trained on"):
        unlearn(plug(SETTING.base), store, Forget.samples({1: foreign}), clients=SETTING.federation, config=FAST)
    assert state_of(store) == state_of(SETTING.collected)


# --- budgets


def test_a_budget_too_small_stops_a_request_before_anything_is_computed():
    """All inputs are NaN: whoever looked at one would fail in another way."""
    store = SETTING.store({None: Budget(4.5)})
    plugged, _ = SETTING.serving("class", store=store)
    before, bits = state_of(store), bits_of(plugged)
    unreadable = SETTING.with_rows(slice(None), torch.nan)
    both = SETTING.requests["sample"] | SETTING.requests["samples of another"]
    for request in (SETTING.requests["sample"], both):
        with pytest.raises(BudgetError, match=r"Client .* Nothing was released"):
            unlearn(plugged, store, request, clients=unreadable)
        assert state_of(store) == before
        assert torch.equal(bits_of(plugged), bits)
        assert plugged.requests == {SETTING.requests["class"]}


def test_a_budget_lasts_for_as_many_requests_as_it_was_made_for():
    three = Ledger()
    for _ in range(3):
        three.spend(1, PRIVATE, "centroids")
    store = SETTING.store({None: Budget(three.epsilon(1, 1e-5))})
    plugged, _ = SETTING.serving("sample", "other samples", store=store)
    with pytest.raises(BudgetError):
        restore(plugged, store, SETTING.requests["sample"], clients=SETTING.federation)
    assert len(plugged.requests) == 2
    restore(plugged, store, list(plugged.requests))  # to the original: nobody is asked


def test_a_way_to_reach_clients_that_does_not_know_what_they_spent_is_refused():
    store = SETTING.store({None: Budget(4.0)})
    with pytest.raises(SettingError, match="ledger"):
        unlearn(
            plug(SETTING.base),
            store,
            SETTING.requests["sample"],
            clients=InProcess(SETTING.federation, SETTING.base),
            config=FAST,
        )
    assert payers_of(store) == []


def test_rows_that_are_no_numbers_do_not_stop_a_request_since_that_would_tell_of_them():
    store, plugged = SETTING.store(), plug(SETTING.base)
    broken = SETTING.with_rows(SETTING.federation.client(1).train[20], torch.nan)
    both = SETTING.requests["sample"] | SETTING.requests["samples of another"]
    unlearn(plugged, store, both, clients=broken, config=FAST)
    assert sorted(payers_of(store)) == [0, 1]
    assert bool(store.vectors.isfinite().all())
    assert plugged.requests == {both}


# --- filters that do not go with it


@pytest.mark.parametrize("name", ["class", "client", "sample"])
def test_where_the_filter_is_left_to_us_nothing_exact_is_asked_for(name):
    store, plugged = SETTING.store(), plug(SETTING.base)
    report = unlearn(plugged, store, SETTING.requests[name], clients=Strict(store), config=AUTO)
    assert plugged.served.erasure is None
    assert plugged.served.filter is not None
    assert bool([note for note in report.notes if "No eraser" in note]) == (name == "sample")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"filter": "erasure"}, ["sample", "class"]),
        ({"filter": "both", "eraser_cut": "0"}, ["sample"]),
        ({"rank": WIDTH + 1}, ["sample"]),
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_is_refused_before_anybody_pays(settings, names):
    store, request = SETTING.store(), union(SETTING.requests[name] for name in names)
    with pytest.raises(FedUPError):
        unlearn(plug(SETTING.base), store, request, clients=SETTING.federation, config=replace(FAST, **settings))
    assert payers_of(store) == []


def test_a_report_says_which_retained_classes_the_filter_knows_nothing_of():
    rows = torch.cat([c.train[SETTING.y[c.train] != 3] for c in SETTING.federation.clients])
    rare = SETTING.federation.client(0).train
    parts = [torch.cat([rows, rare[SETTING.y[rare] == 3][:4]])]
    federation = Federation.split(SETTING.x, SETTING.y, parts, heldout=0.0, validation=0.0, num_classes=CLASSES)
    store = collect(SETTING.base, federation, privacy=replace(PRIVATE, epsilon=1.0))
    report = unlearn(plug(SETTING.base), store, SETTING.requests["class"], config=FAST)
    assert any("3" in note for note in report.notes)


# --- erasers


class Marked:
    """The same clients, of which one has rows with a mark that the model's features show."""

    def __init__(self):
        self.rows = SETTING.federation.client(1).train[:80]
        self.x = SETTING.x.clone()
        self.x[self.rows, 6] += 12
        self.federation = replace(SETTING.federation, x=self.x)
        self.request = Forget.samples({1: self.rows})


MARKED = Marked()


def test_an_eraser_is_made_of_one_more_release_that_is_paid():
    dp = replace(PRIVATE, epsilon=20.0, erase_clip=10.0)
    store, plugged = collect(SETTING.base, MARKED.federation, privacy=dp), plug(SETTING.base)
    report = unlearn(plugged, store, MARKED.request, clients=MARKED.federation, config=AUTO)
    assert plugged.served.erasure is not None
    paid = [(charge.client, charge.what) for charge in store.ledger.charges[CLIENTS:]]
    assert paid == [(1, "centroids"), (1, "eraser")]
    assert store.ledger.mu(1) == pytest.approx(math.sqrt(3) * dp.mu)
    assert "TEST MODE" in report.erasure["mechanism"]
    assert max(release.size_bytes for release in report.releases) <= 1_000_000
