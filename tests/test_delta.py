"""A delta: withdrawn rows look unseen, and the base stays as it is, bit for bit."""

import itertools
from functools import cache

import pytest
import torch
from tests._marked import same_bits, weights_of
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, load_filter, plug, purge, restore, save_filter, unlearn
from fedup.errors import ContactError, HarmError, RequestError, SettingError
from fedup.models.views import fingerprint
from fedup.privacy.guarantee import DP
from fedup.run.limits import Limits
from fedup.serving.export import export_program
from fedup.unlearning.closed_form_fit import MOVED_WORDS
from fedup.unlearning.plan import Terms

DELTA = FilterConfig(filter="delta")
CLASSES, WIDTH = 3, 20


@cache
def world():
    """A model that has learned its clients' rows by heart, and their federation; read only."""
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(1500) // 3 % CLASSES
    centres = 0.3 * torch.randn(CLASSES, WIDTH, generator=draws)
    x = centres[y] + torch.randn(len(y), WIDTH, generator=draws)
    federation = Federation.split(x, y, [torch.arange(i, 1500, 3) for i in range(3)], heldout=0.4, validation=0.1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    rows, optimizer = federation.rows(), torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False), federation


def withdrawn(client, start=0, count=60):
    return Forget.samples({client: world()[1].client(client).train[start : start + count].tolist()})


def serving(*requests, config=DELTA, statistics="moments"):
    model, federation = world()
    plugged, store = plug(model), collect(model, federation, statistics=statistics)
    reports = [unlearn(plugged, store, request, clients=federation, config=config) for request in requests]
    return plugged, store, reports


def hits(model, rows):
    _, federation = world()
    return float((model(federation.x[rows]).argmax(1) == federation.y[rows]).float().mean())


def test_withdrawn_rows_look_unseen_and_unplugging_gives_the_base_back_bit_for_bit(tmp_path):
    model, federation = world()
    before, client, request = fingerprint(model), federation.client(1), withdrawn(1)
    forgotten, unseen = federation.forgotten(request), torch.cat([client.validation, client.heldout])
    assert hits(model, forgotten) > hits(model, unseen) + 0.15, "premise"
    plugged, store, (report,) = serving(request)
    verdict = report.verdicts[request.digest]
    assert verdict.finding in ("forgotten", "too few rows"), verdict.words
    assert report.clients_contacted == [1] and report.time_s["delta"] > 0
    assert abs(hits(plugged, forgotten) - hits(plugged, unseen)) < 0.1
    others = torch.cat([federation.client(i).heldout for i in (0, 2)])
    assert hits(plugged, others) > hits(model, others) - 0.04
    assert plugged.served.derived_from_forgotten and plugged.served.filter is None
    save_filter(plugged, tmp_path / "filter")
    again = plug(model)
    load_filter(again, tmp_path / "filter")
    assert same_bits(again, plugged) and torch.equal(again(federation.x), plugged(federation.x))
    with plugged.restored():
        assert torch.equal(plugged(federation.x), model(federation.x))
    restore(plugged, store, request, clients=federation)
    assert plugged.served is None and plugged.unplug() is model and fingerprint(model) == before


def test_a_set_of_requests_gives_one_delta_whatever_the_order_and_asks_no_client_twice():
    _, federation = world()
    first, second, third = withdrawn(0), withdrawn(1), withdrawn(1, 60, 60)
    one, store, reports = serving(first, second, third)
    assert [report.clients_contacted for report in reports] == [[0], [1], [1]]
    other, *_ = serving(third, second, first)
    together, *_ = serving([second, first, third])
    for plugged in (other, together):
        assert torch.equal(plugged(federation.x), one(federation.x)) and plugged.requests == one.requests
    alone, *_ = serving(first)
    assert not torch.equal(alone(federation.x), one(federation.x))
    restore(one, store, [second, third], clients=federation)
    assert torch.equal(alone(federation.x), one(federation.x))


def test_a_forgotten_class_is_never_answered_beside_a_delta():
    _, federation = world()
    request = withdrawn(1)
    for requests in ([Forget.classes([2]), request], [request, Forget.classes([2])]):
        plugged, *_ = serving(*requests)
        assert plugged.served.filter is not None and plugged.served.delta is not None
        assert 2 not in plugged(20 * federation.x).argmax(1)


def test_what_cannot_be_had_is_refused_and_changes_nothing():
    model, federation = world()
    plugged, store, _ = serving(withdrawn(0), statistics="centroids")
    served, centroids = plugged.served, store.vectors.clone()
    elsewhere = Forget.samples({1: federation.client(0).train[:30].tolist()})
    few = withdrawn(1, count=4)
    for request, error, words in (
        (elsewhere, RequestError, "was not trained on"),
        (few, RequestError, "fewer than 5"),
        (Forget.clients([1]), ContactError, "no way to reach"),
    ):
        with pytest.raises(error, match=words):
            clients = federation if request.sample_ids else None
            unlearn(plugged, store, request, clients=clients, config=DELTA)
        assert plugged.served is served and torch.equal(store.vectors, centroids) and not store.open
    private = collect(model, federation, privacy=DP(epsilon=8.0, delta=1e-5, clip="unit"))
    with pytest.raises(SettingError, match="differential privacy"):
        unlearn(plug(model), private, withdrawn(1), clients=federation, config=DELTA)


def test_withdrawals_get_a_delta_by_default_and_a_client_that_is_gone_another_filter():
    model, federation = world()
    request, leaving = withdrawn(1), Forget.clients([2])
    plugged, _, (report,) = serving(request, config=None)
    assert report.delta["requests"] == [request.digest] and plugged.served.filter is None
    poisoned, poison, store = (
        Forget.samples(request.sample_ids, reason="poison"),
        plug(model),
        collect(model, federation),
    )
    unlearn(poison, store, poisoned, clients=federation, config=DELTA, terms=Terms(max_class_loss=100))
    assert poison.served.delta is None, "its effect on the label is to go, not what is known of it"
    gone, store = plug(model), collect(model, federation)
    assert unlearn(gone, store, leaving).verdicts[leaving.digest].finding == "not measured"
    assert gone.served.delta is None and gone.served.filter is not None


def test_a_delta_never_costs_a_class_more_than_is_allowed():
    model, federation = world()
    for allowed in (0.5, 2.0, 8.0):
        plugged, store, request = plug(model), collect(model, federation), Forget.clients([1])
        try:
            report = unlearn(plugged, store, request, clients=federation, terms=Terms(max_class_loss=allowed))
        except HarmError:
            assert plugged.served is None
        else:
            assert report.worst_class[1].loss <= allowed + 1e-9
            assert (plugged.served.delta is None) == (report.delta is None)


def asked_within(client, allowed):
    """A model that forgets a client by a delta, while no class loses more than is allowed; None if it is refused."""
    model, federation = world()
    plugged, store, terms = plug(model), collect(model, federation), Terms(max_class_loss=allowed)
    try:
        report = unlearn(plugged, store, Forget.clients([client]), clients=federation, config=DELTA, terms=terms)
    except HarmError:
        return None
    return plugged, store, report


def test_scores_are_moved_where_all_of_a_delta_would_cost_a_class_too_much(tmp_path):
    model, federation = world()
    asked = (asked_within(client, allowed) for client in (0, 1, 2) for allowed in (1.5, 2.0, 2.5))
    served = (own for own in asked if own and own[0].served.delta.scale == 1 and own[0].served.filter is not None)
    plugged, store, report = next(served)  # StopIteration: the premise does not hold
    assert any(MOVED_WORDS in note for note in report.notes)
    (request,) = plugged.requests
    (client,) = request.client_ids
    alone, _, _ = asked_within(client, 100.0)
    delta, of_all, rows = plugged.served.delta, alone.served.delta, federation.client(client).train
    assert alone.served.filter is None and delta.by_client.keys() == of_all.by_client.keys() == {client}
    assert all(torch.equal(own, delta.by_client[client][name]) for name, own in of_all.by_client[client].items())
    assert report.worst_class[1].loss <= 2.5 and hits(plugged, rows) < hits(model, rows) - 0.05
    save_filter(plugged, tmp_path / "filter")
    again = plug(model)
    load_filter(again, tmp_path / "filter")
    assert torch.equal(again(federation.x), plugged(federation.x))
    restore(plugged, store, request, clients=federation)
    assert plugged.served is None and plugged.unplug() is model


def test_a_delta_that_is_weaker_or_beside_moved_scores_costs_all_classes_together_no_more_than_allowed():
    model, federation = world()
    kinds = set()
    for client, allowed in itertools.product((0, 1, 2), (0.6, 1.2, 1.7, 2.0)):
        if (served := asked_within(client, allowed)) is None:
            continue
        plugged, *_ = served
        kinds |= {"weaker"} if plugged.served.delta.scale < 1 else set()
        kinds |= {"moved"} if plugged.served.filter is not None else set()
        retained = [own for own in federation.clients if own.id != client]
        rows = torch.cat([rows for own in retained for rows in (own.validation, own.heldout)])
        assert hits(model, rows) - hits(plugged, rows) <= 0.6 * allowed / 100 + 1e-6
    assert kinds == {"weaker", "moved"}, "premise"


def test_another_filter_answers_where_a_run_folder_would_not_put_a_delta_in_force_after_a_restore_too():
    model, federation = world()
    plugged, store, (first, second) = plug(model), collect(model, federation), (withdrawn(1), withdrawn(2))

    def judge(trial, requests):
        assert trial.served.requests == requests and trial.base is model
        return {
            "original": {"validation": {"retain": 0.9}},
            "forgotten": {"validation": {"retain": 0.9 if trial.served.delta is None else 0.8}},
        }

    options = {"clients": federation, "terms": Limits().terms(judge, plugged)}
    report = unlearn(plugged, store, first, **options)
    alone = weights_of(plugged)
    assert plugged.served.delta is None and any("Another filter answers" in note for note in report.notes)
    unlearn(plugged, store, second, **options)
    restore(plugged, store, second, **options)
    again = weights_of(plugged)
    assert alone.keys() == again.keys() and all(torch.equal(alone[name], again[name]) for name in alone)
    assert unlearn(plug(model), collect(model, federation), first, config=DELTA, **options).delta, "it was chosen"
    assert Limits(force=True).terms(judge, plugged).refusal is Limits(None).terms(judge, plugged).refusal is None


def test_purging_keeps_the_sum_alone_and_later_requests_build_on_it(tmp_path):
    model, federation = world()
    requests = withdrawn(0), withdrawn(1), withdrawn(2)
    whole, *_ = serving(*requests)
    plugged, store, _ = serving(*requests[:2])
    before = plugged(federation.x)
    purge(plugged, store)
    assert plugged.served.delta.is_merged and torch.equal(plugged(federation.x), before)
    save_filter(plugged, tmp_path / "filter")
    again = plug(model)
    load_filter(again, tmp_path / "filter")
    assert unlearn(again, store, requests[2], clients=federation).clients_contacted == [2]
    assert torch.allclose(again(federation.x), whole(federation.x), atol=1e-5)
    report = restore(again, store, requests[0], clients=federation)
    assert 1 in report.clients_contacted and 2 not in report.clients_contacted, "of the sum nobody knows whose it is"
    assert torch.allclose(again(federation.x), serving(*requests[1:])[0](federation.x), atol=1e-5)


def test_after_a_purge_a_later_request_keeps_the_delta_of_those_before():
    # Found by a reader: nobody knew whose the merged changes were, and the earlier request lost them in silence.
    first, second = withdrawn(0), withdrawn(1)
    plugged, store, _ = serving(first, config=None)
    purge(plugged, store)
    report = unlearn(plugged, store, second, clients=world()[1])
    assert set(report.delta["requests"]) == {first.digest, second.digest}


def test_a_delta_is_exported_with_the_model(tmp_path):
    plugged, *_ = serving(withdrawn(1))
    x = world()[1].x[:8]
    export_program(plugged.view(), x, tmp_path / "model.pt2", about={})
    assert torch.allclose(torch.export.load(tmp_path / "model.pt2").module()(x), plugged(x), atol=1e-5)
