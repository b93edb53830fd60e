"""The closed form through the library: forgetting is subtraction, and a dropped class is never answered."""

import copy
from dataclasses import fields, replace

import pytest
import torch
from tests._digits import TrainedDigits
from torch import nn

import fedup
import fedup.clients.moments as moments_of
from fedup import FilterConfig, Forget, Terms, collect, load_filter, plug, purge, restore, save_filter, unlearn
from fedup.clients.in_process import InProcess
from fedup.errors import (
    ArtifactError,
    ContactError,
    DataError,
    FedUPError,
    HarmError,
    RequestError,
    SettingError,
)
from fedup.filters.closed_form import ClosedForm, RetainedStatistics
from fedup.request import union
from fedup.statistics.client_parts import ClientParts
from fedup.statistics.integer_moments import MomentConfig, one_class, packed
from fedup.unlearning.closed_form_fit import expected_recall, retained_statistics

FORCED = {"force": True, "terms": Terms(measure=False)}  # digits leave classes with few rows
ANY_ROWS = MomentConfig(least_rows=1, by_class="always")


@pytest.fixture(scope="module")
def digits():
    trained = TrainedDigits()
    trained.moments = collect(trained.model, trained.federation, statistics=ANY_ROWS)
    return trained


@pytest.fixture
def store(digits):
    return copy.deepcopy(digits.moments)


@pytest.fixture(params=["always", "auto", "never"])
def any_store(digits, request):
    """Class moments from all clients, from some, or from none."""
    config = MomentConfig(least_rows=1, by_class=request.param)
    return collect(digits.model, digits.federation, statistics=config)


def without(digits, forget):
    """The moments of a collection that leaves the requests out, by the clients themselves."""
    return collect(digits.model, digits.federation, statistics=ANY_ROWS, forget=forget)


def samples(digits, client, n):
    return Forget.samples({client: digits.federation.client(client).train[:n].tolist()})


def parts_of(store):
    """All that a store holds, copied."""
    return {field.name: copy.deepcopy(getattr(store, field.name)) for field in fields(store)}


def assert_same(parts, others):
    for name, value in parts.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, others[name]), name
        elif isinstance(value, dict) and any(isinstance(each, torch.Tensor) for each in value.values()):
            assert value.keys() == others[name].keys(), name
            assert all(torch.equal(each, others[name][key]) for key, each in value.items()), name
        elif isinstance(value, ClientParts):
            assert all(value.place(client).digest == others[name].place(client).digest for client in value)
            assert list(value) == list(others[name])
        elif name not in ("ledger", "traffic"):
            assert value == others[name], name


def requests_of(digits):
    return [
        Forget.clients([1]),
        Forget.classes([3]),
        samples(digits, 2, 25),
        Forget.clients([4]),
        samples(digits, 0, 9),
    ]


def test_what_is_left_is_what_clients_report_when_they_leave_it_out(digits, any_store):
    plugged, active, store = plug(digits.model), [], any_store
    for request in requests_of(digits):
        active.append(request)
        unlearn(plugged, store, request, clients=digits.federation, **FORCED)
        assert store.retained(union(active)) == without(digits, active).total
    for request in requests_of(digits)[:-1]:
        active.remove(request)
        restore(plugged, store, request, clients=digits.federation, **FORCED)
        assert store.retained(union(active)) == without(digits, active).total


def test_any_order_gives_the_same_filter_to_the_bit(digits, store):
    filters = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        plugged, own = plug(digits.model), copy.deepcopy(store)
        for i in order:
            unlearn(plugged, own, requests_of(digits)[i], clients=digits.federation, **FORCED)
        filters.append(plugged.served.filter.state_dict())
    assert all(torch.equal(filters[0][name], other[name]) for other in filters for name in other)


def test_a_client_and_a_class_ask_nobody_and_their_common_cell_is_asked_for_once(digits, store):
    held = [cell.label for cell in store.cells_of(1)]
    plugged, contact = plug(digits.model), InProcess(digits.federation, digits.model)
    report = unlearn(plugged, store, Forget.clients([1]), clients=contact, **FORCED)
    assert not report.clients_contacted
    plan = fedup.plan(plugged, store, [Forget.clients([1]), Forget.classes([held[0]])], clients=contact, force=True)
    assert plan.cells_asked == [(1, held[0])]
    report = unlearn(plugged, store, Forget.classes([held[0]]), clients=contact, **FORCED)
    assert list(report.clients_contacted) == [1]


def test_without_a_way_to_the_client_nothing_changes(digits, store):
    plugged, label = plug(digits.model), store.cells_of(1)[0].label
    unlearn(plugged, store, Forget.clients([1]), **FORCED)
    before, served = parts_of(store), plugged.served
    with pytest.raises(ContactError):
        unlearn(plugged, store, Forget.classes([label]), **FORCED)
    assert plugged.served is served
    assert_same(parts_of(store), before)


def test_accuracy_on_retained_classes_stays_and_the_base_comes_back_to_the_bit(digits, store):
    plugged, before = plug(digits.model), digits.model(digits.test_x)
    unlearn(plugged, store, Forget.classes([3]), **FORCED)
    kept = [label for label in range(10) if label != 3]
    assert (
        float(digits.test_accuracy(plugged)[kept].mean()) > float(digits.test_accuracy(digits.model)[kept].mean()) - 2
    )
    assert digits.test_accuracy(plugged)[3] == 0
    with plugged.restored():
        assert torch.equal(plugged(digits.test_x), before)
    restore(plugged, store, Forget.classes([3]))
    assert torch.equal(plugged.unplug()(digits.test_x), before)


def test_files_of_store_and_filter_give_the_same_answers(digits, store, tmp_path):
    plugged = plug(digits.model)
    unlearn(plugged, store, samples(digits, 2, 25) | Forget.clients([1]), clients=digits.federation, **FORCED)
    save_filter(plugged, tmp_path / "filter")
    fedup.save_centroids(store, tmp_path / "store")
    again, loaded = plug(digits.model), fedup.load_centroids(tmp_path / "store")
    load_filter(again, tmp_path / "filter")
    assert isinstance(again.served.filter, ClosedForm)
    assert torch.equal(again(digits.test_x), plugged(digits.test_x))
    assert loaded.total == store.total and loaded.excluded == store.excluded
    request = Forget.classes([5])
    for model, own in ((plugged, store), (again, loaded)):
        unlearn(model, own, request, clients=digits.federation, **FORCED)
    assert torch.equal(again(digits.test_x), plugged(digits.test_x))


def test_after_a_purge_nothing_of_the_forgotten_is_kept_and_later_requests_still_fit(digits, any_store):
    plugged, store = plug(digits.model), any_store
    unlearn(plugged, store, [Forget.clients([1]), Forget.classes([3])], clients=digits.federation, **FORCED)
    purge(plugged, store)
    left = without(digits, [Forget.clients([1]), Forget.classes([3])])
    assert store.total == left.total
    assert 1 not in store.parts and 3 not in store.of_classes
    known = [client for client in store.parts if store.parts.has_second(client)]
    asked_for = store.config.by_class == "never"  # then the cells of class 3 are known one by one
    assert known or not asked_for
    for client in store.parts:
        sums = [store.sums_of(cell) for cell in store.cells_of(client) if cell.label != 3]
        assert torch.equal(torch.stack(sums), left.parts[client].sums)
        assert client not in known or torch.equal(store.parts[client].second, left.parts[client].second)
    later = Forget.clients([2])
    unlearn(plugged, store, later, clients=digits.federation, **FORCED)
    assert store.retained(union(plugged.requests)) == without(digits, plugged.requests).total
    restore(plugged, store, Forget.classes([3]), clients=digits.federation, **FORCED)  # its cells are asked for again
    assert store.retained(union(plugged.requests)) == without(digits, plugged.requests).total


def test_sealed_samples_come_back_without_asking(digits, store):
    plugged, terms = plug(digits.model), Terms(measure=False, keep_sealed=True)
    both = [samples(digits, 2, 25), Forget.clients([4])]
    unlearn(plugged, store, both, clients=digits.federation, force=True, terms=terms)
    restore(plugged, store, both[0], force=True, terms=terms)
    assert store.retained(both[1]) == without(digits, [both[1]]).total
    assert store.total == digits.moments.total


def test_few_samples_take_their_whole_cell_out_and_the_rows_never_leave(digits):
    store = collect(digits.model, digits.federation, statistics="moments")
    label, rows = digits.frequent(2)
    plugged, few = plug(digits.model), Forget.samples({2: rows[:2].tolist()})
    unlearn(plugged, store, few, clients=digits.federation, **FORCED)
    assert int(store.counts[store.cell((2, label)).start]) == 0
    more = Forget.samples({2: rows[2:12].tolist()})
    unlearn(plugged, store, more, clients=digits.federation, **FORCED)
    assert int(store.counts[store.cell((2, label)).start]) == len(rows) - 12
    one = Forget.samples({2: rows[12:13].tolist()})
    before = parts_of(store)
    with pytest.raises(FedUPError, match="fewer than 5 rows"):
        unlearn(plugged, store, one, clients=digits.federation, **FORCED)
    assert_same(parts_of(store), before)


@pytest.mark.parametrize("config", [FilterConfig(filter="bottleneck"), FilterConfig(filter="both")])
def test_moments_and_centroids_do_not_mix(digits, store, config):
    with pytest.raises(SettingError, match="moments"):
        unlearn(plug(digits.model), store, Forget.clients([1]), config=config)
    with pytest.raises(SettingError, match="moments"):
        unlearn(plug(digits.model), digits.store(), Forget.clients([1]), config=FilterConfig(filter="closed_form"))


def test_the_bound_follows_the_features_where_nobody_chose_one(digits):
    large = nn.Sequential(*digits.model[:-1], nn.Linear(32, 10))
    large[1] = copy.deepcopy(digits.model[1])
    large[1].weight.data *= 1e3
    collected = collect(large, digits.federation, statistics="moments")
    assert collected.config.bound > 256 and collected.shortened <= 0.01 * collected.total.rows


def test_without_clients_the_recall_of_classes_is_estimated_and_a_request_that_harms_is_refused(digits, store):
    refusals = 0
    for client in range(6):
        plugged, own = plug(digits.model), copy.deepcopy(store)
        before = parts_of(own)
        try:
            report = unlearn(plugged, own, Forget.clients([client]), terms=Terms(max_class_loss=0.5))
            assert report.worst_class[1].loss <= 0.5
        except HarmError:
            refusals += 1
            assert plugged.served is None
            assert_same(parts_of(own), before)
    assert 0 < refusals < 6, "premise"


def test_the_estimate_of_recall_is_near_what_clients_count(digits, store):
    plugged = plug(digits.model)
    unlearn(plugged, store, Forget.classes([3]), **FORCED)
    rows = torch.cat([client.train for client in digits.federation.clients])
    retained = retained_statistics(store, Forget.classes([3]))
    for part, model in (("before", digits.model), ("after", plugged)):
        right = model(digits.x[rows]).argmax(1) == digits.y[rows]
        errors = [
            getattr(recall, part) - float(right[digits.y[rows] == label].double().mean())
            for label, recall in expected_recall(plugged, retained, plugged.served.filter).items()
        ]
        assert sum(map(abs, errors)) / len(errors) < 0.05 and max(map(abs, errors)) < 0.2


def test_a_cell_out_of_use_is_asked_for_as_the_store_has_it(digits, store):
    label, rows = digits.frequent(2)
    plugged, some = plug(digits.model), Forget.samples({2: rows[:10].tolist()})
    for request in (some, Forget.classes([label])):
        unlearn(plugged, store, request, clients=digits.federation, **FORCED)
    restore(plugged, store, some, clients=digits.federation, **FORCED)  # its cell is out of use, and stays as it is
    unlearn(plugged, store, Forget.clients([2]), clients=digits.federation, **FORCED)
    assert store.retained(union(plugged.requests)) == without(digits, plugged.requests).total


def test_a_cell_that_few_samples_took_out_at_collection_comes_back_and_nothing_more(digits, monkeypatch):
    _, rows = digits.frequent(2)
    few, more = Forget.samples({2: rows[:2].tolist()}), Forget.samples({2: rows[2:22].tolist()})
    own = collect(digits.model, digits.federation, statistics="moments", forget=[few])
    honest = moments_of.MomentChangeQuestion.answer

    def doubled(self, data):
        leaving, returning = honest(self, data)
        twice = {label: 2 * second for label, second in returning.by_class.items()}
        return leaving, replace(returning, moments=returning.moments + returning.moments, by_class=twice)

    with monkeypatch.context() as patched:
        patched.setattr(moments_of.MomentChangeQuestion, "answer", doubled)
        with pytest.raises(ContactError, match="not what was asked for"):
            unlearn(plug(digits.model), own, [few, more], clients=digits.federation, **FORCED)
    unlearn(plug(digits.model), own, [few, more], clients=digits.federation, **FORCED)
    fresh = collect(digits.model, digits.federation, statistics="moments", forget=[few, more])
    assert own.retained(few | more) == fresh.total


@pytest.mark.parametrize("scale", [2e4, 1e-7])
def test_statistics_on_a_grid_are_those_of_the_grid_they_name(digits, scale):
    model = copy.deepcopy(digits.model)
    model[3].weight.data *= scale
    model[3].bias.data *= scale
    try:
        own = collect(model, digits.federation, statistics="moments")
    except DataError:
        return  # no grid suits them, and nothing is stored
    assert own.total == collect(model, digits.federation, statistics=own.config).total


def test_a_client_that_answers_something_else_than_it_was_asked_changes_nothing(digits, store, monkeypatch):
    """Rows that nobody asked about, or a cell that does not fit its client's and its class's totals."""
    honest = moments_of.MomentChangeQuestion.answer
    monkeypatch.setattr(moments_of.MomentChangeQuestion, "answer", lambda self, data: honest(self, data)[::-1])
    plugged, before = plug(digits.model), parts_of(store)
    with pytest.raises(FedUPError):
        unlearn(plugged, store, samples(digits, 2, 25), clients=digits.federation, **FORCED)
    unlearn(plugged, store, Forget.clients([2]), **FORCED)
    cell, inflated = moments_of.MomentsQuestion.answer, 2**40

    def lie(self, data):
        answer = cell(self, data)
        return replace(answer, by_class={label: second + inflated for label, second in answer.by_class.items()})

    monkeypatch.setattr(moments_of.MomentsQuestion, "answer", lie)
    label = store.cells_of(2)[0].label
    report = unlearn(plugged, store, Forget.classes([label]), clients=digits.federation, **FORCED)
    assert report.pending and all("not what any rows have" in why for why in report.pending.values())
    assert_same(
        parts_of(store),
        {**before, "sample_labels": store.sample_labels, "pending": store.pending, "bytes_up": store.bytes_up},
    )


def test_a_client_that_leaves_cannot_take_along_what_others_have(digits, store, monkeypatch):
    """What it says that leaves fits the total, but neither its own sums nor those of its class."""
    others = RetainedStatistics.of(store.total - store.moments_of(2), store.config)
    rows = store.total.rows - store.moments_of(2).rows
    extra = packed((0.5 * rows * others.within / store.config.step**2).long())
    honest, before, plugged = moments_of.MomentChangeQuestion.answer, parts_of(store), plug(digits.model)

    def lie(self, data):
        leaving, returning = honest(self, data)
        label, second = next(iter(leaving.by_class.items()))
        leaving = replace(leaving, by_class={**leaving.by_class, label: second + extra})
        (store.total - one_class(leaving.moments, label, second + extra)).check(store.config)  # the premise
        return leaving, returning

    monkeypatch.setattr(moments_of.MomentChangeQuestion, "answer", lie)
    with pytest.raises(FedUPError, match="put to its client, is not what any rows have"):
        unlearn(plugged, store, samples(digits, 2, 25), clients=digits.federation, **FORCED)
    assert plugged.served is None
    assert_same(parts_of(store), {**before, "sample_labels": store.sample_labels})


def test_a_class_that_nobody_holds_cannot_be_forgotten(digits):
    others = replace(digits.federation, y=digits.y.masked_fill(digits.y == 9, 8))
    plugged, own = plug(digits.model), collect(digits.model, others)
    with pytest.raises(RequestError, match="changes nothing"):
        unlearn(plugged, own, Forget.classes([9]), clients=others, **FORCED)
    assert plugged.served is None


def test_a_store_whose_parts_do_not_fit_each_other_is_not_loaded(digits, store, tmp_path):
    def spoil(change):
        own = copy.deepcopy(store)
        change(own)
        fedup.save_centroids(own, tmp_path / "store")
        with pytest.raises(ArtifactError):
            fedup.load_centroids(tmp_path / "store")

    spoil(lambda own: own.total.counts.add_(1))
    spoil(lambda own: own.total.sums.neg_())
    spoil(lambda own: own.parts.update({1: replace(own.parts[1], second=own.parts[1].second[:1])}))
    spoil(lambda own: own.parts.update({1: own.parts[2]}))
    spoil(lambda own: own.parts.update({1: replace(own.parts[1], sums=own.parts[1].sums + 1)}))
    spoil(lambda own: own.parts.update({99: own.parts.pop(1)}))
    spoil(lambda own: own.parts.pop(1))
    spoil(lambda own: own.unsent.add(99))
    spoil(lambda own: own.counts.neg_())
    spoil(lambda own: setattr(own, "num_classes", 5))
    spoil(lambda own: setattr(own, "counts", own.counts.int()))


def test_a_filter_file_with_other_weights_is_refused_and_changes_nothing(digits, store, tmp_path):
    plugged = plug(digits.model)
    unlearn(plugged, store, Forget.classes([3]), **FORCED)
    served, path = plugged.served, tmp_path / "filter"
    for change in (
        nn.Module.double,
        lambda fitted: ClosedForm(32, 9, fitted.bound),
        lambda fitted: ClosedForm(31, 10, 8.0),
    ):
        plugged.serve(replace(served, filter=change(copy.deepcopy(served.filter))))
        save_filter(plugged, path)
        plugged.serve(served)
        with pytest.raises(ArtifactError):
            load_filter(plugged, path)
        assert plugged.served is served
