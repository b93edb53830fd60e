"""Persons over Flower: nodes resolve tags, no id travels, and a guarantee for persons is that in process."""

import copy
from dataclasses import asdict

import pytest
import torch
from flwr.common.serde import recorddict_to_proto
from tests.flower._contact import refused, spoiling
from tests.flower._grid import FIRST, Clock, LocalGrid, World, collect, digits

from fedup import Forget, SubjectKey, Terms, finish_pending, plug, unlearn
from fedup.clients.subjects import resolve_there
from fedup.errors import ContactError, RequestError
from fedup.flower import Policy, RunServer, messaging
from fedup.privacy import DP
from fedup.run.limits import Limits

KEY = SubjectKey(bytes(range(32)))
PRIVATE = DP(4.0, clip="unit", unit="subject", replay_seed=0)  # replayed, to compare bits


def person_of(row: int) -> str:
    return f"Patient-{row % 23}"


@pytest.fixture(scope="module")
def world() -> World:
    plain = digits(rounds=6, rows=800)
    ids = [person_of(row) for row in range(len(plain.federation.y))]
    return World(plain.federation.with_subjects(ids, key=KEY), plain.model, plain.test_x)


def grid_of(world: World, **settings: object) -> LocalGrid:
    """Nodes that know whose their rows are; half of them hold the key, the others hold tags."""
    apps = {}
    for client in world.federation.ids:
        ids = [person_of(row) for row in world.rows(client).tolist()]
        tags = [KEY.tag(person) for person in ids]
        persons = {"subjects": lambda context, ids=ids: ids, "subject_key": KEY}
        if client % 2:
            persons = {"subjects": lambda context, tags=tags: tags}
        apps[FIRST + client] = world.app(client, **persons, **settings)
    return LocalGrid(apps)


def everything_carried(grid: LocalGrid) -> bytes:
    messages = [message for _, message in grid.sent] + grid.came
    return b"".join(recorddict_to_proto(message.content).SerializeToString() for message in messages)


def test_persons_are_forgotten_as_in_process_and_no_id_travels(world):
    asked = Forget.subjects(["Patient-3", "Patient-5", "Patient-8"], key=KEY)
    grid, results = grid_of(world), []
    for way in (world.federation, world.contact(grid)):
        store, plugged = collect(world.model, way, statistics="moments"), plug(world.model)
        report = unlearn(plugged, store, asked, clients=way, force=True)
        results.append((report.requests, store.total, plugged.served.filter.state_dict(), report.verdicts))
    (here, total, fitted, verdicts), (there, total_there, fitted_there, verdicts_there) = results
    (request,) = here
    assert there == here and len(request.sample_ids) == 4, "one request for all clients"
    assert total_there == total and all(torch.equal(fitted[name], fitted_there[name]) for name in fitted)
    assert [verdict.finding for verdict in verdicts.values()] == [own.finding for own in verdicts_there.values()]
    carried = everything_carried(grid)
    assert b"Patient" not in carried and KEY.secret.hex().encode() not in carried and KEY.secret not in carried
    tags = [tag.encode() for tag in asked.subject_tags]
    questions = [ask for _, ask in grid.asked() if ask.kind != "subjects"]
    assert all(tag in carried for tag in tags), "premise"
    assert not any(tag.decode() in str(ask.details) for ask in questions for tag in tags), "only where it is needed"


def test_a_node_that_does_not_answer_or_does_not_know_leaves_nothing_half_resolved(world):
    store, asked = collect(world.model, world.federation, statistics="moments"), Forget.subjects(["Patient-3"], key=KEY)
    silent = grid_of(world)
    silent.spoil = spoiling(refused, kind="subjects")
    no_persons = world.grid()
    private = grid_of(world, policy=Policy(only_private=True))
    for grid, why in ((silent, "Sundays"), (no_persons, "does not know whose"), (private, "differential privacy only")):
        plugged, kept = plug(world.model), copy.deepcopy(store)
        with pytest.raises(ContactError, match=why):
            unlearn(plugged, kept, asked, clients=world.contact(grid))
        assert plugged.served is None and kept.total == store.total
    with pytest.raises(RequestError, match="no client knows them"):
        unlearn(plug(world.model), store, Forget.subjects(["x"], key=KEY), clients=world.contact(grid_of(world)))


def test_a_node_that_is_away_is_out_of_use_until_it_says_which_rows_a_person_has(world, monkeypatch):
    monkeypatch.setattr(messaging, "time", Clock())  # nobody waits
    asked, away = Forget.subjects([f"Patient-{number}" for number in range(12)], key=KEY), {2}
    grid, results = grid_of(world), []
    for spoil in (lambda node, reply: reply, lambda node, reply: None if node - FIRST in away else reply):
        grid.spoil = spoil
        plugged, store = plug(world.model), collect(world.model, world.federation, statistics="moments")
        options = {
            "clients": world.contact(grid, retries=0),
            "terms": Terms(measure=False),
            "force": True,
        }
        report = unlearn(plugged, store, asked, **options)
        results.append((plugged, store))
    assert report.pending.keys() == {2} == store.clients_out == store.unnamed.keys()
    assert all(2 not in request.sample_ids for request in plugged.requests)
    away.clear()
    assert not finish_pending(plugged, store, **options).pending
    (there, whole), (back, finished) = results
    assert there.requests == back.requests and whole.total == finished.total and not store.unnamed
    assert torch.equal(there(world.test_x), back(world.test_x))
    away.add(2)
    with pytest.raises(ContactError, match="client 2 has not answered"):
        resolve_there(Forget.subjects(["x"], key=KEY), world.contact(grid, retries=0), range(4))


def test_a_guarantee_for_persons_is_that_in_process_and_needs_nodes_that_know_them(world):
    here, there = (
        collect(world.model, way, privacy=PRIVATE) for way in (world.federation, world.contact(grid_of(world)))
    )
    assert torch.equal(here.vectors, there.vectors) and here.how.unit == "subject"
    records = collect(world.model, world.federation, privacy=DP(**{**asdict(PRIVATE), "unit": "record"}))
    assert not torch.allclose(here.vectors, records.vectors), "premise: it matters whose the rows are"
    grid = world.grid()
    with pytest.raises(ContactError, match="does not know whose its rows are"):
        collect(world.model, world.contact(grid), privacy=PRIVATE)
    assert not any(context.state.config_records.get("fedup-ledger") for context in grid.contexts.values())
    unknown = world.grid(subjects=lambda context: [""] * len(world.rows(int(context.node_config["partition-id"]))))
    alone = collect(world.model, world.contact(unknown), privacy=PRIVATE)
    per_row = world.federation.with_subjects(torch.arange(len(world.federation.y)))
    assert torch.equal(alone.vectors, collect(world.model, per_row, privacy=PRIVATE).vectors), (
        "a row of nobody is its own"
    )


def test_the_folder_of_a_server_has_the_request_and_no_id(world, tmp_path):
    contact = world.contact(grid_of(world))
    server = RunServer(tmp_path / "run", world.blank)
    server.keep(world.model)
    server.collect(contact, statistics="moments")
    limits = Limits(None, max_class_loss=100)
    few = Forget.subjects(["Patient-3"], key=KEY)
    outcome = server.unlearn(few, contact, reference="T-1", limits=limits)
    assert outcome.waiting == ["R1"] and server.plugged().served is None
    assert server.unlearn(few, contact, limits=limits).waiting == ["R1"], "asked again it is the same request"
    many = Forget.subjects([f"Patient-{number}" for number in (5, 8, 11, 14)], key=KEY)
    outcome = server.unlearn(many, contact, reference="T-2", limits=limits)
    assert server.state.waiting + server.state.active == server.state.requests
    later = server.unlearn(few, contact, limits=Limits(None, force=True))
    assert "R1" in later.requests and server.state.request("T-1").is_active
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file())
    assert b"Patient" not in content and next(iter(few.subject_tags)).encode() in content
    assert [check for check in server.verify(world.federation.x[:8]) if check.ok is False] == []
