"""A new base was trained without some requests: nothing of them comes back, whatever nodes still hold."""

import pytest
import torch
from tests.cli._in_process import ok
from tests.flower._grid import FIRST, Clock, digits
from tests.flower.test_subjects import KEY, grid_of

import fedup
from fedup import FilterConfig, Forget, MomentConfig, plug
from fedup.errors import ChangedError, RequestError
from fedup.flower import RunServer, messaging
from fedup.run.folder import Run
from fedup.run.limits import Limits
from fedup.run.new_request import NewRequest
from fedup.run.queue import QueueOptions, enqueue, enqueue_restoration, withdraw

WORLD = digits()
ANY = Limits(None, force=True, max_class_loss=100)
CLIENT, CLASS = 1, 3


@pytest.fixture
def server(tmp_path) -> RunServer:
    """One whose model was trained anew without a client and a class; its nodes hold the rows of both."""
    server, contact = RunServer(tmp_path / "run", WORLD.blank), WORLD.contact(WORLD.grid())
    server.keep(digits(1).model)
    server.collect(WORLD.contact(WORLD.grid(), model=digits(1).model), statistics=MomentConfig())
    contact = WORLD.contact(WORLD.grid(), model=digits(1).model)
    for request in (Forget.clients([CLIENT]), Forget.classes([CLASS])):
        server.unlearn(request, contact, limits=ANY)
    server.put_retrained(WORLD.model, server.state)
    return server


@pytest.mark.parametrize("chosen", ["auto", "delta"])
@pytest.mark.parametrize("reason", ["withdrawal", "poison"])
def test_later_answers_are_those_of_a_federation_that_never_had_the_finished_rows(server, chosen, reason):
    left = WORLD.federation.without(Forget.clients([CLIENT]) | Forget.classes([CLASS]))
    request = Forget.samples(WORLD.samples(c2=40).sample_ids, reason=reason)
    named = WORLD.federation.forgotten(request)
    assert (WORLD.federation.y[named] == CLASS).any(), "premise: the request names rows of the finished class"
    config, contact = FilterConfig(filter=chosen), WORLD.contact(WORLD.grid())
    server.collect(contact, statistics=MomentConfig())
    there = server.unlearn(request, contact, config=config, limits=ANY).report
    plugged, store = plug(WORLD.model), fedup.collect(WORLD.model, left, statistics=MomentConfig())
    terms = fedup.Terms(max_class_loss=ANY.max_class_loss)
    trained_on = {2: frozenset(WORLD.federation.client(2).train[:40].tolist()) & set(left.client(2).train.tolist())}
    request = Forget.samples(trained_on, reason=reason)
    here = fedup.unlearn(plugged, store, request, clients=left, config=config, force=True, terms=terms)
    assert torch.equal(server.plugged()(WORLD.test_x), plugged(WORLD.test_x))
    assert there.class_recall == here.class_recall and CLASS not in there.class_recall
    assert [*there.verdicts.values()] == [*here.verdicts.values()]
    assert CLIENT not in there.clients_counting
    assert chosen == "auto" or (server.plugged().served.delta is None) == (reason == "poison")


def test_persons_whose_rows_an_absent_node_has_not_named_are_in_no_new_base(tmp_path, monkeypatch):
    monkeypatch.setattr(messaging, "time", Clock())  # nobody waits
    persons = digits(rounds=6, rows=800)
    grid, later, away = grid_of(persons), digits(1, rounds=6, rows=800).model, 2
    server = RunServer(tmp_path / "run", persons.blank)
    server.keep(persons.model)
    contact = persons.contact(grid, retries=0)
    server.collect(contact, statistics=MomentConfig())
    there, grid.spoil = grid.spoil, lambda node, reply: None if node == FIRST + away else reply
    asked = Forget.subjects([f"Patient-{number}" for number in range(12)], key=KEY)
    server.unlearn(asked, contact, limits=ANY)
    assert server.left_out.subject_tags == asked.subject_tags != server.left_out.resolved_tags  # nodes get the tags
    with pytest.raises(RequestError, match="Client 2 has not said"):
        server.put_retrained(later, server.state)
    grid.spoil = there
    fresh = persons.contact(grid, model=later)
    server.train_on(later, fresh, server.state, rounds=1, limits=ANY, statistics=MomentConfig())
    before = server.state  # a training anew begins, which leaves these persons out by their tags
    assert [own["client"] for own in server.state.pending] == [away]  # its statistics have rows of these persons
    with server.desk("unlearn", fresh, None) as desk:
        desk.finish_pending(limits=ANY)
    (request,) = server.state.active
    assert away in request.forget.sample_ids and server.left_out.resolved_tags == asked.subject_tags
    expected = fedup.collect(later, persons.federation, forget=[request.forget], statistics=MomentConfig())
    store = server.collect(fresh)
    assert store.retained(request.forget) == expected.retained(request.forget)
    server.put_retrained(persons.model, before)
    assert [own.status for own in server.state.requests] == ["finished"]


@pytest.mark.parametrize("kind", ["restore queued", "withdrawn"])
def test_a_request_that_is_taken_back_while_nodes_answer_for_a_new_base_is_not_finished(server, kind):
    server.collect(WORLD.contact(WORLD.grid()), statistics=MomentConfig())
    server.unlearn(Forget.classes([7]), WORLD.contact(WORLD.grid()), limits=ANY)
    with server.run.writing("unlearn") as writer:
        enqueue(writer, [NewRequest(Forget.classes([8]))], QueueOptions())
    before = server.state
    server.unlearn(Forget.clients([2]), WORLD.contact(WORLD.grid()), limits=ANY)
    name, grid, later = {"restore queued": "R3", "withdrawn": "R4"}[kind], WORLD.grid(), digits(1).model
    back = enqueue_restoration if kind == "restore queued" else lambda writer, own, _: withdraw(writer, own)

    def operator(node, reply):
        if server.state.events[-1].kind != kind:
            with server.run.writing("restore") as writer:
                back(writer, [server.state.request(name)], QueueOptions())
        return reply

    grid.spoil, fresh = operator, WORLD.contact(grid, model=later)
    with pytest.raises(ChangedError):
        server.put_retrained(later, before, fresh, limits=ANY, statistics=MomentConfig())
    assert server.state.base == before.base and server.state.request(name).finished_in is None


def test_a_request_that_was_answered_while_a_model_was_trained_anew_is_answered_again_from_it(server, tmp_path):
    contact, later = WORLD.contact(WORLD.grid()), digits(1).model
    server.collect(contact, statistics=MomentConfig())
    server.unlearn(Forget.classes([7]), contact, limits=ANY)
    before = server.state  # a training begins
    server.unlearn(Forget.clients([2]), contact, limits=ANY)
    seen = Run(server.run.path).read()
    with pytest.raises(RequestError, match="R4 came in while the model was trained"):
        server.put_retrained(later, before)
    assert server.state.head == seen.head
    fresh = WORLD.contact(WORLD.grid(), model=later)
    assert server.put_retrained(later, before, fresh, limits=ANY, statistics=MomentConfig()).declined is None
    assert [request.status for request in server.state.requests] == [*["finished"] * 3, "in force"]
    finished = Forget.clients([CLIENT]) | Forget.classes([CLASS, 7])
    left = WORLD.federation.without(finished)
    plugged, store = plug(later), fedup.collect(later, left, statistics=MomentConfig())
    fedup.unlearn(plugged, store, Forget.clients([2]), clients=left, force=True, terms=fedup.Terms(100))
    assert torch.equal(server.plugged()(WORLD.test_x), plugged(WORLD.test_x))
    assert [check for check in server.verify(WORLD.federation.x[:8]) if check.ok is False] == []
    for name, words in {"R3": "trained without it", "R4": "the weights still hold it"}.items():
        ok("evidence", name, "--run", server.run.path)
        assert words in (server.run.path / "evidence" / f"{name}.html").read_text()
