"""Any sequence of requests while clients go away and come back: nobody is held up, and nothing forgotten comes back."""

import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests._marked import everything_of, weights_of

from fedup import FilterConfig, Terms, collect, finish_pending, plug, purge, restore, unlearn
from fedup.errors import ContactError
from fedup.request import union
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store_file import load_centroids, save_centroids

CONFIG = FilterConfig(rank=4, steps=10, batch_size=32, gentle=False)
TERMS = {"force": True, "terms": Terms(measure=False)}


class Absent(RuleBasedStateMachine):
    """A served model and its store; subclasses say who is away, and how clients are reached."""

    base: torch.nn.Module
    federation: object
    requests: dict  # by name
    statistics: object  # of the collection
    references: dict  # by set of requests: the filter, and what is retained, with everybody there

    def __init__(self):
        super().__init__()
        self.away = set()
        self.plugged = plug(self.base)
        self.store = collect(self.base, self.reach(), statistics=self.statistics)

    def reach(self):
        raise NotImplementedError

    @rule(client=st.integers(0, 2))
    def go_or_come_back(self, client):
        self.away ^= {client}

    @rule(data=st.data())
    def unlearn(self, data):
        names = sorted(name for name, own in self.requests.items() if own not in self.plugged.requests)
        if names:
            request = self.requests[data.draw(st.sampled_from(names))]
            self.answer(
                lambda: unlearn(self.plugged, self.store, request, clients=self.reach(), config=CONFIG, **TERMS)
            )

    @precondition(lambda self: self.plugged.requests)
    @rule(data=st.data())
    def restore(self, data):
        request = data.draw(st.sampled_from(sorted(self.plugged.requests, key=str)))
        self.answer(lambda: restore(self.plugged, self.store, request, clients=self.reach(), **TERMS))

    @precondition(lambda self: self.plugged.requests)
    @rule()
    def finish(self):
        self.answer(lambda: finish_pending(self.plugged, self.store, clients=self.reach(), **TERMS))

    @precondition(lambda self: self.plugged.requests)
    @rule()
    def purge(self):
        purge(self.plugged, self.store)
        assert not self.store.sealed and not self.store.eraser_parts
        assert all(self.store.is_empty(cell) for cell in self.store.cells_pending)

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            save_centroids(self.store, Path(folder) / "store")
            self.store = load_centroids(Path(folder) / "store")

    def answer(self, call):
        """Answered, whoever is away; unless nobody is left whose statistics could be used: then nothing changes."""
        before = everything_of(self.plugged, self.store)
        try:
            report = call()
        except ContactError as error:
            assert self.away and "No client is left whose statistics" in str(error)
            assert everything_of(self.plugged, self.store)[:2] == before[:2]
            return
        assert report.pending.keys() <= self.away
        assert self.store.pending.keys() == report.pending.keys() or not self.plugged.requests

    @invariant()
    def forgotten_rows_are_in_no_statistics_that_are_used(self):
        left_out = union([*self.plugged.requests, *self.store.open])
        y = self.federation.y
        for client, ids in left_out.sample_ids.items():
            for i in ids:
                cell = self.store.cell((client, int(y[i])))
                out = client in left_out.client_ids or cell.label in left_out.class_ids or self.store.awaits(cell)
                assert out or i in self.store.excluded[cell.name]

    @invariant()
    def what_is_retained_is_that_of_the_clients_in_use(self):
        if isinstance(self.store, MomentStore) and all(self.store.pending.values()) and self.plugged.requests:
            fresh = collect(self.base, self.federation, statistics=self.store.config, forget=self.plugged.requests)
            out = self.store.clients_out - union(self.plugged.requests).client_ids
            expected = fresh.total
            for client in out:
                expected = expected - fresh.moments_of(client)
            assert self.store.retained(union(self.plugged.requests)) == expected

    def teardown(self):
        """Once all are back, the filter is the one that the same requests get with everybody there."""
        self.away = set()
        active = self.plugged.requests
        if not active:
            return
        report = finish_pending(self.plugged, self.store, clients=self.reach(), **TERMS)
        assert not report.pending and not self.store.pending and self.plugged.requests == active
        if active not in self.references:
            plugged, store = plug(self.base), collect(self.base, self.federation, statistics=self.statistics)
            unlearn(plugged, store, active, clients=self.federation, config=CONFIG, **TERMS)
            self.references[active] = weights_of(plugged)
        mine, reference = weights_of(self.plugged), self.references[active]
        assert mine.keys() == reference.keys()
        assert all(torch.equal(mine[name], reference[name]) for name in mine)
