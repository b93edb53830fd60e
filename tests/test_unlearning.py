"""Requests at the server: the filter is a function of the set of active requests, and an error changes nothing."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests._forced import restore, unlearn
from tests._marked import Unreachable, noted_examples, refused, state_of
from torch import nn

from fedup import Federation, FilterConfig, Forget, Trace, collect, fingerprint, iid, plug, purge
from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.in_process import InProcess
from fedup.errors import ContactError, DataError, FedUPError, FingerprintError, NotFittedError, RequestError
from fedup.request import union
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.store_file import load_centroids, save_centroids
from fedup.unlearning.plan import Terms

CONFIG = FilterConfig(rank=4, steps=10, batch_size=32)
REMAP = FilterConfig(rank=4, steps=10, batch_size=32, class_policy="remap")


class Setting:
    """Four clients with four classes each, a small model and requests that overlap."""

    def __init__(self):
        torch.manual_seed(0)
        self.y = torch.arange(160) % 4
        self.x = torch.randn(160, 8) + 3 * nn.functional.one_hot(self.y, 8)
        self.federation = Federation.split(self.x, self.y, iid(self.y, 4))
        self.base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        self.fingerprint = fingerprint(self.base)
        self.collected = collect(self.base, self.federation, statistics=CentroidConfig(ratio=0.5))
        self.requests = {
            "client": Forget.clients([3]),
            "class": Forget.classes([2]),
            "sample": Forget.samples({1: self.ids(1, 0)[:2]}),
            "sample of the same cell": Forget.samples({1: self.ids(1, 0)[2:4]}),
            "samples of many cells": Forget.samples(
                {1: [*self.ids(1, 2)[:2], *self.ids(1, 3)[:1]], 3: self.ids(3, 0)[:1]}
            ),
            "whole cell": Forget.samples({0: self.ids(0, 1)}),
        }

    def ids(self, client, label):
        """The rows of a class that a client trained on."""
        train = self.federation.client(client).train
        return train[self.y[train] == label].tolist()

    def store(self):
        return copy.deepcopy(self.collected)

    def answer(self, names, config=CONFIG):
        """Bits of the filter when requests come one after another."""
        plugged, store = plug(self.base), self.store()
        for name in names:
            unlearn(plugged, store, self.requests[name], clients=self.federation, config=config)
        return _bits(plugged)


SETTING = Setting()
NAMES = list(SETTING.requests)


def _bits(plugged):
    weights = plugged.served.filter.state_dict()
    return torch.cat([weights["encoder"].flatten(), weights["decoder"].flatten()])


class Spy(InProcess):
    """Notes which clients are asked for centroids, and can fail at one of them."""

    def __init__(self, setting, fail_at=None, change=None):
        super().__init__(setting.federation, setting.base)
        self.asked, self.fail_at, self.change = [], fail_at, change

    def _answer(self, client, question):
        if not isinstance(question, CentroidsQuestion):
            return super()._answer(client, question)
        self.asked.append((client, question.labels))
        if client == self.fail_at:
            raise ConnectionError(f"client {client} is gone")
        summary = super()._answer(client, question)
        if self.change:
            self.change(summary)
        return summary


def _joined_bits(names, config):
    """A reference that shares no history: the paper's protocol, asked once for the union of the requests."""
    joined = union(SETTING.requests[name] for name in names)
    plugged = plug(SETTING.base)
    store = collect(SETTING.base, SETTING.federation, statistics=CentroidConfig(ratio=0.5), forget=[joined])
    if config.class_policy != "drop":  # what the paper relabels is collected, too
        store = SETTING.store()
    unlearn(plugged, store, joined, clients=SETTING.federation, config=config)
    return _bits(plugged)


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking would take minutes
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=7),
    st.sampled_from([CONFIG, CONFIG, REMAP, replace(REMAP, class_policy="remap_client")]),
)
def test_the_filter_depends_on_the_final_set_of_requests_alone(tmp_path_factory, history, config):
    """Any history of requests, restorations, purges and reloads ends where the paper's protocol does."""
    plugged, store, active = plug(SETTING.base), SETTING.store(), set()
    path = tmp_path_factory.mktemp("store") / "centroids.safetensors"
    for name, keep_sealed, destroy, reload in history:
        request = SETTING.requests[name]
        if name in active:
            restore(plugged, store, request, clients=SETTING.federation)
        else:
            unlearn(
                plugged, store, request, clients=SETTING.federation, config=config, terms=Terms(keep_sealed=keep_sealed)
            )
        active ^= {name}
        if destroy and active:
            purge(plugged, store)
        if reload:
            save_centroids(store, path)
            store = load_centroids(path)
    assert plugged.requests == {SETTING.requests[name] for name in active}
    assert fingerprint(SETTING.base) == SETTING.fingerprint
    if active:
        assert torch.equal(_bits(plugged), _joined_bits(sorted(active), config))
    else:
        with pytest.raises(NotFittedError):
            plugged(SETTING.x)


@pytest.mark.parametrize("name", NAMES)
def test_dropped_data_changes_no_bit_of_the_filter(name):
    """Neither what is cached of it nor, in the paper's protocol, the rows themselves; that contacts nobody later."""
    request, store, x = SETTING.requests[name], SETTING.store(), SETTING.x.clone()
    forgotten = SETTING.federation.forgotten(request)
    x[forgotten] = torch.nan
    poisoned = Federation(x, SETTING.y, SETTING.federation.clients, 4)
    clients = SETTING.federation.clients
    cells = {(client.id, int(SETTING.y[row])) for client in clients for row in client.train if row in forgotten}
    for cell in store.cells:
        if cell.name in cells:  # as cached before the request: dropped, or replaced by the client's new answer
            store.vectors[cell.slot] = torch.nan
    cached, asked = plug(SETTING.base), plug(SETTING.base)
    unlearn(cached, store, request, clients=poisoned, config=CONFIG)
    fresh = collect(SETTING.base, poisoned, statistics=CentroidConfig(ratio=0.5), forget=[request])
    report = unlearn(asked, fresh, request, clients=Unreachable(), config=CONFIG, terms=Terms(measure=False))
    assert report.clients_contacted == []
    expected = SETTING.answer([name])
    assert torch.equal(_bits(cached), expected) and torch.equal(_bits(asked), expected)


def _examples_of(monkeypatch, names, policy):
    """What the filter is fitted to: labels by cell."""
    seen = noted_examples(monkeypatch)
    SETTING.answer(names, FilterConfig(rank=4, steps=1, class_policy=policy))
    labels = dict(zip(seen[-1].rows.tolist(), seen[-1].labels.tolist(), strict=True))
    cells = SETTING.collected.cells
    return {
        cell.name: [labels[row] for row in range(cell.start, cell.start + cell.size) if row in labels] for cell in cells
    }


@pytest.mark.parametrize("policy", ["remap", "remap_client"])
def test_remapped_labels_are_random_retained_classes_whatever_other_requests_there_are(monkeypatch, policy):
    alone = _examples_of(monkeypatch, ["class"], policy)
    remapped = [labels for (_, label), labels in alone.items() if label == 2]
    assert all(remapped)
    assert 1 < len({label for labels in remapped for label in labels} - {2}) == len(set().union(*remapped))
    assert all(set(labels) == {label} for (_, label), labels in alone.items() if label != 2)
    distinct = [len(set(labels)) for labels in remapped]
    assert max(distinct) > 1 if policy == "remap" else set(distinct) == {1}
    with_client = _examples_of(monkeypatch, ["client", "class"], policy)
    assert all(with_client[client, 2] == alone[client, 2] for client in (0, 1, 2))
    assert with_client[3, 2] == []


@pytest.mark.parametrize("config", [CONFIG, REMAP], ids=["drop", "remap"])
def test_client_and_class_requests_contact_nobody_and_send_nothing_where_nobody_counts(config):
    asked = {"clients": Unreachable(), "terms": Terms(measure=False)}
    for before in ([], ["samples of many cells"], ["class", "sample"]):
        plugged, store = plug(SETTING.base), SETTING.store()
        for name in before:
            unlearn(plugged, store, SETTING.requests[name], clients=SETTING.federation, config=config)
        for request in (Forget.clients([2]), Forget.classes([3])):
            content, requests = state_of(store), plugged.requests
            report = unlearn(plugged, store, request, config=config, **asked)
            assert (report.clients_contacted, report.bytes_up, report.bytes_down) == ([], 0, 0)
            assert state_of(store) == content
            assert report.requests == plugged.requests == requests | {request}
            assert set(report.time_s) - {"erase"} == {"check", "contact", "fit", "swap"}
            assert report.total_time_s == pytest.approx(sum(report.time_s.values()))
        restore(plugged, store, Forget.clients([2]), **asked)
        assert plugged.served.config == config  # later answers keep the settings


def test_a_sample_request_asks_the_touched_clients_for_the_touched_cells_only():
    plugged, store, spy = plug(SETTING.base), SETTING.store(), Spy(SETTING)
    before = SETTING.collected
    report = unlearn(plugged, store, SETTING.requests["samples of many cells"], clients=spy, config=CONFIG)
    assert spy.asked == [(1, {2, 3}), (3, {0})]
    assert report.clients_contacted == [1, 3]
    assert report.bytes_up == store.size_bytes - before.size_bytes > 0 and report.bytes_down > 0
    for cell in store.cells:
        touched = cell.name in {(1, 2), (1, 3), (3, 0)}
        assert torch.equal(store.vectors[cell.slot], before.vectors[cell.slot]) != touched
        assert bool(store.excluded.get(cell.name)) == touched
    assert store.sealed == {}


SEALED = {"clients": SETTING.federation, "config": CONFIG, "terms": Terms(keep_sealed=True)}


def test_sealed_originals_are_put_back_without_contact():
    plugged, store = plug(SETTING.base), SETTING.store()
    unlearn(plugged, store, SETTING.requests["sample"], **SEALED)
    unlearn(plugged, store, SETTING.requests["client"])
    assert set(store.sealed) == {(1, 0)}
    restore(plugged, store, SETTING.requests["sample"], clients=Unreachable(), terms=Terms(measure=False))
    assert torch.equal(store.vectors, SETTING.collected.vectors)
    assert (store.sealed, store.excluded) == ({}, {})


def test_purge_destroys_what_requests_seal_and_nothing_else():
    plugged, store = plug(SETTING.base), SETTING.store()
    unlearn(plugged, store, SETTING.requests["sample"], **SEALED)
    unlearn(plugged, store, SETTING.requests["class"])
    before, answer = store.vectors.clone(), plugged(SETTING.x)
    gone = purge(plugged, store)
    assert gone == [(0, 2), (1, 0), (1, 2), (2, 2), (3, 2)]
    assert store.sealed == {}
    for cell in store.cells:
        if cell.label == 2:
            assert not store.vectors[cell.slot].any() and not store.counts[cell.slot].any()
        else:
            assert torch.equal(store.vectors[cell.slot], before[cell.slot])
    assert torch.equal(plugged(SETTING.x), answer)
    with pytest.raises(ContactError, match="purged"):
        restore(plugged, store, SETTING.requests["class"])
    restore(plugged, None, [SETTING.requests["sample"], SETTING.requests["class"]])  # the last ones: nobody is needed
    assert plugged.requests == frozenset()
    assert torch.equal(plugged.unplug()(SETTING.x), SETTING.base(SETTING.x))


@pytest.fixture
def served():
    """A plugged model and a store that requests have already worked on: sealed, replaced and purged cells."""
    plugged, store = plug(SETTING.base), SETTING.store()
    for name in ("sample", "class"):
        unlearn(plugged, store, SETTING.requests[name], clients=SETTING.federation, config=CONFIG)
    purge(plugged, store)
    unlearn(plugged, store, SETTING.requests["samples of many cells"], **SEALED)
    assert store.excluded and store.sealed and store.purged
    return plugged, store


def _interrupt(fitted):
    raise KeyboardInterrupt


FAILURES = {
    "a client is gone": (lambda: {"clients": Spy(SETTING, fail_at=2)}, ConnectionError),
    "NaN from a client": (lambda: {"clients": Spy(SETTING, change=lambda s: s.vectors.fill_(torch.nan))}, DataError),
    "the fit diverges": (lambda: {"config": FilterConfig(rank=4, steps=10, lr=1e20)}, DataError),
    "rank too wide": (lambda: {"config": FilterConfig(rank=17)}, FedUPError),
    "interrupted in the fit": (lambda: {"terms": Terms(trace=Trace(every=5, measure=_interrupt))}, KeyboardInterrupt),
}


@pytest.mark.parametrize(("failure", "error"), FAILURES.values(), ids=FAILURES.keys())
def test_an_error_in_the_middle_changes_nothing(served, failure, error):
    request = Forget.samples({0: SETTING.ids(0, 0)[:2], 1: SETTING.ids(1, 0)[4:5], 2: SETTING.ids(2, 1)[:2]})
    for keep_sealed in (False, True):
        options = {"clients": SETTING.federation, "terms": Terms(), **failure()}
        options["terms"] = replace(options["terms"], keep_sealed=keep_sealed)
        with refused(*served, error):
            unlearn(*served, request, **options)
    if error in (DataError, KeyboardInterrupt) and "config" not in options:
        for name in ("sample", "class"):  # replaced and purged cells
            options = {"clients": SETTING.federation, **failure()}
            with refused(*served, error):
                restore(*served, SETTING.requests[name], **options)


def test_requests_that_cannot_be_answered_are_refused_and_change_nothing(served):
    everything = {i: SETTING.federation.client(i).train for i in range(4)}
    for request in (
        Forget.clients([9]),
        Forget.classes([4]),
        Forget.samples({7: [1]}),
        Forget.samples({1: [10_000]}),
        Forget.samples({1: SETTING.ids(2, 0)[:1]}),
        Forget.samples({1: SETTING.federation.client(1).heldout[:1]}),
        Forget(),
        SETTING.requests["sample"],  # active already
        Forget.clients([0, 1, 2, 3]),
        Forget.classes([0, 1, 3]),  # class 2 is forgotten already
        Forget.samples(everything),
        [],
    ):
        for config in (CONFIG, REMAP):
            with refused(*served, FedUPError):
                unlearn(*served, request, clients=SETTING.federation, config=config)
    with refused(*served, ContactError):  # without clients
        unlearn(*served, Forget.samples({2: SETTING.ids(2, 0)[:1]}))
    for store, request, error in (
        (True, Forget.clients([0]), RequestError),  # not active
        (True, [], RequestError),
        (False, SETTING.requests["sample"], RequestError),
        (True, SETTING.requests["sample"], ContactError),
    ):
        with refused(*served, error):
            restore(served[0], served[1] if store else None, request)
    unlearn(*served, Forget.clients([0, 1, 2]), clients=SETTING.federation)
    with refused(*served, RequestError):
        unlearn(*served, Forget.clients([3]))  # the last one
    with pytest.raises(RequestError):
        purge(plug(SETTING.base), SETTING.store())


def test_centroids_of_another_base_cut_or_request_are_refused(served):
    other = copy.deepcopy(SETTING.base)
    nn.init.zeros_(other[2].bias)
    foreign = {
        FingerprintError: [
            collect(other, SETTING.federation, statistics="centroids"),
            collect(SETTING.base, SETTING.federation, statistics="centroids", cut="0"),
        ],
        RequestError: [collect(SETTING.base, SETTING.federation, statistics="centroids", forget=[Forget.clients([0])])],
    }
    for error, stores in foreign.items():
        for store in stores:
            with refused(*served, error):
                unlearn(served[0], store, Forget.clients([2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_base_of_another_precision_forgets_and_comes_back(dtype):
    base, federation = copy.deepcopy(SETTING.base).to(dtype), replace(SETTING.federation, x=SETTING.x.to(dtype))
    original, plugged = base(federation.x), plug(base)
    unlearn(plugged, collect(base, federation, statistics="centroids"), SETTING.requests["class"], config=CONFIG)
    answer = plugged(federation.x)
    assert answer.dtype == dtype and not torch.equal(answer, original)
    with plugged.restored():
        assert torch.equal(plugged(federation.x), original)
