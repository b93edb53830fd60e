"""The state of a folder: a fold over events (of whole histories: tests/run/test_any_history.py)."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedup import Forget
from fedup.errors import ArtifactError, RequestError
from fedup.privacy import Charge
from fedup.run import state as folding
from fedup.run.charges import charges_of, event_of
from fedup.run.folder import Run
from fedup.run.journal import GENESIS, Event
from fedup.run.state import FileRecord, State, after, state_of


def record(kind, n):
    return FileRecord(f"{kind}-{n:016x}.safetensors", f"{n:064x}", 10 + n)


def event(kind, body, seq=1):
    return Event(seq, "2026-01-01", kind, body, f"{seq:064x}")


def unlearned(*asked, seq=1):
    requests = [
        {"id": number, "forget": Forget.clients([3]).to_json(), "reference": reference, "withheld": False}
        for number, reference in asked
    ]
    return event("unlearned", {"requests": requests, "filter": None, "centroids": None}, seq)


def test_files_are_the_latest_of_each_kind_and_the_head_is_the_last_event():
    assert (State().head, State().base, State().files, State().next_id(2)) == (GENESIS, "", (), "R3")
    model, fitted = record("model", 1), record("filter", 2)
    first, second = record("centroids", 3), record("centroids", 4)
    asked = unlearned(("R1", None), ("R2", None)).body
    events = [
        event("trained", {"model": model.to_json(), "fingerprint": "base"}),
        event("collected", {"centroids": first.to_json()}, 2),
        event("unlearned", {**asked, "filter": fitted.to_json(), "centroids": second.to_json()}, 3),
        event("declined", {"requests": [], "declined": [{"id": "R9"}], "filter": None}, 4),
        event("restored", {"requests": ["R2"], "filter": fitted.to_json(), "centroids": None}, 5),
        event("purged", {"centroids": first.to_json()}, 6),
        event("restored", {"requests": ["R1"], "filter": None, "centroids": None}, 7),
    ]
    files = [(model,), (model, first), *[(model, second, fitted)] * 3, (model, first, fitted), (model, first)]
    active = [[], [], ["R1", "R2"], ["R1", "R2"], ["R1"], ["R1"], []]
    for number in range(len(events)):
        state = state_of(events[: number + 1])
        assert state.files == files[number]
        assert [request.id for request in state.active] == active[number]
        assert (state.head, state.base) == (events[number].hash, "base")
        assert state.next_id() == ("R1" if number < 2 else "R3")
    assert state.collected == events[1]
    assert [request.restored_in.seq for request in state.requests] == [7, 5]


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
    "booked": {
        "terms": [{"what": "centroids", "mechanism": "", "replayable": False, "correction": False}],
        "charges": [[0, 1.0, "r", 0.0, 0], [7, 0.5, "s", 0.0, 0]],
    },
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


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_state_that_takes_one_event_after_another_is_the_fold_over_all_of_them(data):
    """From any earlier state, too: a history that went on elsewhere does not show in it."""
    kinds = st.sampled_from(sorted(SOUND))
    paths = {(): State()}
    for _ in range(data.draw(st.integers(1, 12))):
        path = data.draw(st.sampled_from(sorted(paths)))
        kind = data.draw(kinds)
        paths[(*path, kind)] = after(paths[path], event(kind, SOUND[kind], seq=len(path) + 1))
    for path, state in paths.items():
        events = [event(kind, SOUND[kind], seq) for seq, kind in enumerate(path, start=1)]
        assert state == state_of(events)
        assert list(state.events) == events and state.head == (events[-1].hash if events else GENESIS)


def test_a_commit_folds_its_own_event_and_none_before_it(tmp_path, monkeypatch):
    run, folded, fold = Run(tmp_path / "run"), [], folding._after
    run.start({})
    monkeypatch.setattr(folding, "_after", lambda state, event: folded.append(event.seq) or fold(state, event))
    with run.writing("test") as writer:
        folded.clear()
        for _ in range(5):
            writer.commit("budgeted", SOUND["budgeted"])
    assert folded == [seq for seq in range(2, 7) for _ in range(2)]  # before it is written, and after


CHARGES = st.builds(
    Charge,
    client=st.integers(0, 2**63 - 1),
    mu=st.floats(0, 1e6),
    what=st.sampled_from(["centroids", "eraser"]),
    mechanism=st.text(max_size=3),
    release=st.text(max_size=3),
    replayable=st.booleans(),
    correction=st.booleans(),
    covered=st.floats(0, 1e6),
)


@given(st.lists(CHARGES, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_charges_are_read_back_from_their_event_as_they_were(charges):
    kind, body = event_of(charges)
    body = json.loads(json.dumps(body))
    assert list(charges_of(kind, body)) == charges
    state_of([event(kind, body)])


def test_a_request_is_found_by_its_id_or_else_by_a_reference_that_is_its_own_in_any_case():
    back = event("restored", {"requests": ["R1"], "filter": None, "centroids": None}, 3)
    asked = unlearned(("R1", "T-1"), ("R2", "Straße 7")), unlearned(("R3", "r1"), ("R4", "t-1"), seq=2)
    state = state_of([*asked, back])
    names = {"r1": "R1", "R3": "R3", "straße 7": "R2", "STRASSE 7": "R2"}
    assert {name: state.request(name).id for name in names} == names
    listed = "'T-1': R1: forget clients [3], taken back; R4: forget clients [3], in force."
    with pytest.raises(RequestError, match=f"^2 requests have the reference {re.escape(listed)}"):
        state.request("T-1")
    for unknown in ("R5", "R", "1", "R1 ", "None", "", " "):
        with pytest.raises(RequestError, match=r"There is no request .* there are: R1 \(T-1\), R2 .*, R4 \(t-1\)\."):
            state.request(unknown)
        with pytest.raises(RequestError, match="none yet"):
            State().request(unknown)
