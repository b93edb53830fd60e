"""A new base was trained without some requests: nothing of them comes back, whatever nodes still hold."""

import pytest
import torch
from tests.flower._grid import digits

import fedup
from fedup import FilterConfig, Forget, MomentConfig, plug
from fedup.flower import RunServer
from fedup.run.answer import Limits

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
