"""Bytes in reports of clients in process and in the journal are those of Flower's own protocol buffers."""

import pytest
from tests._forced import unlearn
from tests.flower._contact import Carried
from tests.flower._grid import collect

from fedup import DP, FilterConfig, plug
from fedup.flower import RunServer
from fedup.run.limits import Limits
from fedup.statistics.centroids import CentroidConfig

CLEAR = DP(100.0, clip=4.0)
BOTH = FilterConfig(rank=8, steps=4, filter="both")
FORCED = Limits(max_loss=None, force=True)


@pytest.mark.parametrize("privacy", [None, CLEAR], ids=["exact", "DP"])
def test_in_process_the_bytes_are_those_that_would_be_sent(world, privacy):
    """To nodes that hold the weights. Over Flower a question says besides what a row looks like, and an answer what the
    node calls its rules."""
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact, statistics=CentroidConfig(seed=9))  # nodes hold the weights now, and are known
    contact.ledger = collect(world.model, world.federation).ledger
    counted = []
    for reached in (contact, world.federation):
        store = collect(world.model, reached, privacy=privacy)
        config = BOTH if privacy is None else FilterConfig(rank=8, steps=4)
        report = unlearn(plug(world.model), store, world.samples(c2=30, c3=30), clients=reached, config=config)
        counted.append([store.traffic.bytes_up, store.traffic.bytes_down, report.bytes_up, report.bytes_down])
        counted[-1] += [store.traffic.messages, report.traffic.messages]
        counted[-1] += [sorted((one.client, one.what) for one in report.releases)]
    assert counted[0][4:] == counted[1][4:]
    assert counted[0][0::2][:2] == pytest.approx(counted[1][0::2][:2], rel=0.01, abs=60 * max(counted[0][4:6]))
    assert counted[0][1::2][:2] == pytest.approx(counted[1][1::2][:2], abs=60 * max(counted[0][4:6]))  # down


@pytest.mark.parametrize("privacy", [None, CLEAR], ids=["exact", "DP"])
def test_the_journal_has_the_bytes_that_the_grid_carried(world, tmp_path, privacy):
    grid = world.grid()
    contact, server = world.contact(grid), RunServer(tmp_path / "run", world.blank)
    server.keep(world.model)
    for call in (
        lambda: server.collect(contact, privacy=privacy),
        lambda: server.unlearn(world.samples(c2=30), contact, config=FilterConfig(rank=8, steps=4), limits=FORCED),
        lambda: server.restore("R1", contact=contact),
    ):
        carried = Carried(grid)
        call()
        body = server.state.events[-1].body
        assert (body["bytes_up"], body["bytes_down"]) == (carried.up, carried.down)
        assert sum(release["bytes"] for release in body["releases"]) <= body["bytes_up"]
