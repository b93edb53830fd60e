"""A node that joins late, comes back with other rows, or without its number: collected from alone."""

from dataclasses import replace

import pytest
from tests.flower._grid import FIRST, Clock, digits
from tests.flower.test_absent import FORCED

from fedup import Forget, collect
from fedup.errors import ContactError
from fedup.flower import RunServer, messaging
from fedup.request import union

WORLD = digits()


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch):
    monkeypatch.setattr(messaging, "time", Clock())


def served(grid, folder):
    """A server that collected and answered a request, and its contact."""
    contact, server = WORLD.contact(grid, retries=0), RunServer(folder, WORLD.blank)
    server.keep(WORLD.model)
    server.collect(contact, statistics="moments")
    server.unlearn(Forget.classes([3]), contact, limits=FORCED)
    return contact, server


def assert_as_if_all_had_been_asked_now(server, store, federation):
    fresh = collect(WORLD.model, federation, statistics=store.config, forget=server.state.forgets)
    assert store.retained(union(server.state.forgets)) == fresh.total
    assert [check for check in server.verify(WORLD.federation.x[:8]) if check.ok is False] == []
    assert server.plugged().requests == server.state.forgets


def test_a_node_that_joins_late_is_added_and_one_with_other_rows_is_counted_once(tmp_path):
    grid = WORLD.grid()
    late = grid.apps.pop(FIRST + 3)
    contact, server = served(grid, tmp_path / "run")
    grid.apps[FIRST + 3] = late
    store = server.collect(contact, clients=[3])
    assert 3 in store.known_clients
    assert_as_if_all_had_been_asked_now(server, store, WORLD.federation)
    rows = WORLD.rows(1)
    x = WORLD.federation.x.clone()
    x[rows] *= 0.5
    grid.apps[FIRST + 1] = WORLD.app(1, data=lambda context: (x[rows], WORLD.federation.y[rows]))
    store = server.collect(contact, clients=[1])
    assert_as_if_all_had_been_asked_now(server, store, replace(WORLD.federation, x=x))


def test_a_node_without_its_number_is_named_and_holds_up_nobody(tmp_path):
    grid = WORLD.grid()
    _, server = served(grid, tmp_path / "run")
    grid.apps[7], grid.contexts[7] = grid.apps.pop(FIRST + 1), grid.contexts[FIRST + 1]  # it was started again
    outcome = server.unlearn(WORLD.samples(c1=40), WORLD.contact(grid, retries=0), limits=FORCED)
    assert (
        "bound to another node id" in outcome.report.pending[1] and "RunServer.release(1)" in outcome.report.pending[1]
    )
    server.release(1)
    contact = WORLD.contact(grid, retries=0)
    assert not server.finish_pending(contact).report.pending and server.state.pending == ()
    with pytest.raises(ContactError, match="no node goes by that number"):
        server.collect(contact, clients=[9])
