"""The state of a folder: a fold over events, checked against a plain account of what was asked and taken back."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fedup import Forget
from fedup.errors import ArtifactError, RequestError
from fedup.run.journal import GENESIS, Event
from fedup.run.state import FileRecord, State, state_of

forgets = st.one_of(
    st.builds(Forget.clients, st.sets(st.integers(0, 9), min_size=1)),
    st.builds(Forget.classes, st.sets(st.integers(0, 9), min_size=1)),
    st.builds(Forget.samples, st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 99), min_size=1), min_size=1)),
)
references = st.none() | st.sampled_from(["TICKET-1", "Brief vom 3. Mai", "straße"])


def record(kind, n):
    return FileRecord(f"{kind}-{n:016x}.safetensors", f"{n:064x}", 10 + n)


class Folder(RuleBasedStateMachine):
    """Events in any order that fedup can write them in, beside a plain account of them."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.asked = {}  # id: (forget, reference)
        self.active = []
        self.model = self.centroids = self.filter = None

    def append(self, kind, body):
        seq = len(self.events) + 1
        self.events.append(Event(seq, "2026-01-01", kind, body, f"{seq:064x}"))

    def new(self, kind):
        return record(kind, len(self.events))

    @rule()
    def train(self):
        self.model = self.new("model")
        self.append("trained", {"model": self.model.to_json(), "fingerprint": f"base {self.model.name}"})

    @rule(kind=st.sampled_from(["collected", "purged"]))
    def renew_centroids(self, kind):
        self.centroids = self.new("centroids")
        self.append(kind, {"centroids": self.centroids.to_json(), "cells": []})

    @rule(kind=st.sampled_from(["declined", "evaluated", "evidenced"]))
    def note(self, kind):
        self.append(kind, {"requests": [], "declined": [{"id": "R1"}], "filter": None})

    @rule(new=st.lists(st.tuples(forgets, references), min_size=1, max_size=3), replaced=st.booleans())
    def unlearn(self, new, replaced):
        state = state_of(self.events)
        requests = []
        for i, (forget, reference) in enumerate(new):
            asked = {"id": state.next_id(i), "forget": forget.to_json(), "reference": reference, "withheld": False}
            requests.append(asked)
            self.asked[requests[-1]["id"]] = (forget, reference)
            self.active.append(requests[-1]["id"])
        self._serve("unlearned", requests, replaced)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), replaced=st.booleans())
    def restore(self, data, replaced):
        back = data.draw(st.lists(st.sampled_from(self.active), min_size=1, unique=True))
        self.active = [request for request in self.active if request not in back]
        self._serve("restored", back, replaced)

    def _serve(self, kind, requests, replaced):
        self.filter = self.new("filter") if self.active else None
        if replaced:
            self.centroids = self.new("centroids")
        changed = self.centroids.to_json() if replaced else None
        stored = self.filter.to_json() if self.filter else None
        self.append(kind, {"requests": requests, "filter": stored, "centroids": changed})

    @invariant()
    def active_requests_are_those_unlearned_and_not_restored(self):
        state = state_of(self.events)
        assert [request.id for request in state.active] == self.active
        assert state.forgets == {self.asked[request][0] for request in self.active}
        assert {r.id: (r.forget, r.reference) for r in state.requests} == self.asked

    @invariant()
    def ids_count_up(self):
        state = state_of(self.events)
        assert [request.id for request in state.requests] == [f"R{n + 1}" for n in range(len(self.asked))]
        assert state.next_id() == f"R{len(self.asked) + 1}"
        assert state.next_id(2) == f"R{len(self.asked) + 3}"

    @invariant()
    def files_are_the_latest_of_each_kind(self):
        state = state_of(self.events)
        assert (state.model, state.centroids, state.filter) == (self.model, self.centroids, self.filter)
        assert state.files == tuple(file for file in (self.model, self.centroids, self.filter) if file)
        assert state.base == (f"base {self.model.name}" if self.model else "")

    @invariant()
    def a_request_is_found_by_its_id_in_any_case_and_says_when(self):
        state = state_of(self.events)
        for number in self.asked:
            found = state.request(number.lower())
            assert found is state.request(number)
            assert found.id == number
            assert number in [asked["id"] for asked in found.asked_in.body["requests"]]
            assert found.is_active == (number in self.active)
            assert found.is_active or number in found.restored_in.body["requests"]

    @invariant()
    def the_head_is_the_last_event(self):
        state = state_of(self.events)
        assert state.events == tuple(self.events)
        assert state.head == (self.events[-1].hash if self.events else GENESIS)


Folder.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None, derandomize=True)
TestFolder = Folder.TestCase


def event(kind, body, seq=1):
    return Event(seq, "2026-01-01", kind, body, f"{seq:064x}")


def unlearned(*asked, seq=1):
    requests = [
        {"id": number, "forget": Forget.clients([3]).to_json(), "reference": reference, "withheld": False}
        for number, reference in asked
    ]
    return event("unlearned", {"requests": requests, "filter": None, "centroids": None}, seq)


def test_a_request_is_found_by_its_reference_in_any_case():
    state = state_of([unlearned(("R1", "Straße 7"), ("R2", None))])
    assert state.request("straße 7").id == "R1"
    assert state.request("STRASSE 7").id == "R1"


def test_a_reference_of_several_requests_is_refused_and_they_are_listed():
    back = event("restored", {"requests": ["R1"], "filter": None, "centroids": None}, 3)
    state = state_of([unlearned(("R1", "T-1")), unlearned(("R2", "t-1"), ("R3", None), seq=2), back])
    listed = (
        "2 requests have the reference 'T-1': R1: forget clients [3], taken back; R2: forget clients [3], in force."
    )
    with pytest.raises(RequestError, match=f"^{re.escape(listed)} Name the one that is meant by its id"):
        state.request("T-1")
    assert [state.request(own).id for own in ("r1", "R2")] == ["R1", "R2"]


def test_an_id_comes_before_a_reference_that_looks_like_it():
    state = state_of([unlearned(("R1", None)), unlearned(("R2", "R1"), ("R3", "r1"), seq=2)])
    assert state.request("r1").id == "R1"


@pytest.mark.parametrize("name", ["R3", "R", "1", "R1 ", "None", "", " "])
def test_an_unknown_request_is_refused_with_those_that_are_known(name):
    state = state_of([unlearned(("R1", "T-1"), ("R2", None))])
    with pytest.raises(RequestError, match=r"There is no request .* there are: R1, R2\."):
        state.request(name)
    with pytest.raises(RequestError, match="none yet"):
        State().request(name)


@given(st.text(max_size=12).filter(lambda kind: not kind.isascii() or kind != kind.lower() or not kind.endswith("ed")))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_unknown_kinds_of_event_are_refused(kind):
    with pytest.raises(ArtifactError, match=r"Event 2 .*cannot be understood"):
        state_of([event("created", {"about": {}}), event(kind, {}, seq=2)])


SOUND = {
    "created": {"about": {}},
    "trained": {"model": record("model", 1).to_json(), "fingerprint": "f"},
    "collected": {"centroids": record("centroids", 1).to_json()},
    "purged": {"centroids": record("centroids", 2).to_json()},
    "unlearned": unlearned(("R1", None)).body,
    "restored": {"requests": ["R1"], "filter": None, "centroids": None},
    "charged": {"client": 0, "mu": 1.0, "what": "centroids", "mechanism": "", "release": "r"},
    "budgeted": {"clients": [], "budget": {"epsilon": 8.0, "delta": 1e-5}},
}
ODD = st.sampled_from([None, "text", 3, [], ["R1"], {}, [{}], {"more": 1}])


@given(st.sampled_from([(kind, name) for kind, body in SOUND.items() for name in body]), ODD)
@example(("charged", "mu"), -1.0)
@example(("charged", "client"), "1")
@example(("collected", "centroids"), {"name": "n", "sha256": "s", "size_bytes": 1, "more": 2})
@example(("budgeted", "budget"), {"epsilon": "8"})
@settings(max_examples=40, deadline=None, derandomize=True)
def test_an_event_that_lacks_something_or_holds_something_odd_is_refused_by_its_number(damage, value):
    kind, name = damage
    state_of([event(kind, SOUND[kind])])
    for body in ({key: own for key, own in SOUND[kind].items() if key != name}, {**SOUND[kind], name: value}):
        try:
            state_of([event(kind, body)])
        except ArtifactError as error:
            assert str(error).startswith(f"Event 1 ({kind}) cannot be understood: ")
            continue
        assert name in body or name in ("release", "fingerprint")
