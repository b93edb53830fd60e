"""Any sequence of calls: refusals change nothing, order does not matter, and the base always comes back."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests._marked import everything_of, marked, refused, state_of, weights_of

from fedup import FilterConfig, Forget, fingerprint, plan, plug, purge, restore, unlearn
from fedup.errors import FedUPError, HarmError, NotFittedError, PlugError, RequestError
from fedup.request import union
from fedup.serving.filter_file import load_filter, save_filter
from fedup.statistics.store_file import load_centroids, save_centroids

MARKED = marked()
CONFIG = FilterConfig(steps=60, batch_size=64, lr=1e-2)
POOL = [MARKED.requests[name] for name in ("first", "third", "few", "bystander", "class", "client")]
UNKNOWN = [Forget(), Forget.clients([9]), Forget.classes([7]), Forget.samples({0: [10**6]}), Forget.samples({8: [1]})]
REACHED = {"clients": MARKED.federation}
ORIGINAL, PRINT = MARKED.base(MARKED.x), fingerprint(MARKED.base)
FILTERS = {}  # by requests, open requests and force: the bits of every filter that was served, in any example
subsets = st.lists(st.sampled_from(POOL), min_size=1, max_size=2, unique=True)


class Library(RuleBasedStateMachine):
    """One model that is served, its centroids, and what should be in force."""

    def __init__(self):
        super().__init__()
        self.plugged, self.store = plug(MARKED.base), MARKED.store()
        self.active, self.forced = frozenset(), False

    def _state(self):
        return everything_of(self.plugged, self.store)

    def _answered(self, call, *, force):
        """Whether a call was answered: else nothing has changed."""
        before = self._state()
        try:
            report = call()
        except HarmError as error:
            assert not force
            assert error.classes
            assert self._state() == before
            return False
        assert bool(report.forced) <= force
        self.active = report.requests
        if self.plugged.served is not None and id(self.plugged.served) != before[0]:
            self.forced = force
            self._check_filter(report)
        return True

    def _check_filter(self, report):
        weights = weights_of(self.plugged)
        known = FILTERS.setdefault((self.active, frozenset(self.store.open), self.forced), weights)
        assert weights.keys() == known.keys()
        assert all(torch.equal(weights[name], known[name]) for name in known)
        forget_set = union(self.active)
        kept = MARKED.federation.retained(forget_set)
        with torch.no_grad():
            right = [model(MARKED.x[kept]).argmax(1) == MARKED.y[kept] for model in (MARKED.base, self.plugged)]
        for label in set(range(4)) - forget_set.class_ids:
            assert self.forced or report.class_recall[label].loss <= 5
            before, after = (float(hits[MARKED.y[kept] == label].float().mean()) for hits in right)
            assert self.forced or after > before - 0.15, f"class {label} is lost"

    @rule(requests=subsets, force=st.sampled_from([False, False, True]))
    def unlearn(self, requests, force):
        options = {**REACHED, "config": CONFIG, "force": force}
        if self.active & set(requests):
            with refused(self.plugged, self.store, RequestError):
                unlearn(self.plugged, self.store, requests, **options)
            return
        before = self.active
        if self._answered(lambda: unlearn(self.plugged, self.store, requests, **options), force=force):
            assert self.active | self.store.open >= before | set(requests)
            assert not force or not self.store.open & set(requests)

    @rule(requests=subsets, force=st.booleans())
    def restore(self, requests, force):
        known = set(requests) <= self.active | self.store.open
        if not known:
            with refused(self.plugged, self.store, RequestError):
                restore(self.plugged, self.store, requests, **REACHED)
        elif self._answered(lambda: restore(self.plugged, self.store, requests, **REACHED, force=force), force=force):
            assert not (self.active | self.store.open) & set(requests)

    @rule(request=st.sampled_from(UNKNOWN), good=st.sampled_from(POOL))
    def refuse_unknown(self, request, good):
        for call in (unlearn, restore):
            with refused(self.plugged, self.store, RequestError):
                call(self.plugged, self.store, [request, good], **REACHED)

    @rule(requests=st.lists(st.sampled_from(POOL + UNKNOWN), max_size=3))
    def plan(self, requests):
        before = self._state()
        try:
            planned = plan(self.plugged, self.store, requests, **REACHED, config=CONFIG)
            assert set(planned.clients_contacted) <= {0, 1, 2}
        except FedUPError:
            pass
        assert self._state() == before

    @rule(raises=st.booleans())
    def look_at_the_original(self, raises):
        before = self._state()
        try:
            with self.plugged.restored() as original:
                assert torch.equal(self.plugged(MARKED.x), ORIGINAL)
                assert torch.equal(original(MARKED.x), ORIGINAL)
                if raises:
                    raise KeyError
        except KeyError:
            assert raises
        with pytest.raises(PlugError):
            original(MARKED.x)
        assert self._state() == before

    @precondition(lambda self: self.active)
    @rule()
    def purge(self):
        answer = self.plugged(MARKED.x)
        purge(self.plugged, self.store)
        assert torch.equal(self.plugged(MARKED.x), answer)

    @rule()
    def save_and_load(self):
        with TemporaryDirectory() as folder:
            self._save_and_load(Path(folder))

    def _save_and_load(self, folder):
        save_centroids(self.store, folder / "store")
        loaded = load_centroids(folder / "store")
        assert state_of(loaded) | {"traffic": None} == state_of(self.store) | {"traffic": None}
        self.store = loaded
        if not self.active:
            with refused(self.plugged, self.store, NotFittedError):
                save_filter(self.plugged, folder / "filter")
            return
        save_filter(self.plugged, folder / "filter")
        again = plug(MARKED.base)
        load_filter(again, folder / "filter")
        assert torch.equal(again(MARKED.x), self.plugged(MARKED.x))
        self.plugged = again

    @invariant()
    def serves_what_is_active_and_leaves_the_base_alone(self):
        assert fingerprint(MARKED.base) == PRINT
        assert self.plugged.requests == self.active
        if not self.active:
            with pytest.raises(NotFittedError):
                self.plugged(MARKED.x)

    def teardown(self):
        if self.active:
            restore(self.plugged, None, self.active)
        assert self.plugged.served is None and torch.equal(self.plugged.unplug()(MARKED.x), ORIGINAL)


TestLibrary = Library.TestCase
TestLibrary.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
