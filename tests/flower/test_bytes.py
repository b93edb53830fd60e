"""Bytes reported are bytes sent, both ways: by Flower's own protocol buffers, message by message."""

import pytest
from flwr.app import Message
from flwr.common.serde import recorddict_to_proto
from tests._forced import restore, unlearn
from tests.flower._grid import FIRST, LocalGrid, World, digits, told

from fedup import DP, FilterConfig, Forget, collect, plug
from fedup.errors import ContactError
from fedup.flower import Policy, RunServer, messaging
from fedup.run.answer import Limits
from fedup.statistics.centroids import CentroidConfig

CLEAR = DP(100.0, clip=4.0)
BOTH = FilterConfig(rank=8, steps=8, filter="both")
FORCED = Limits(max_loss=None, force=True)


@pytest.fixture(scope="module")
def world() -> World:
    return digits()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(messaging.time, "sleep", lambda seconds: None)


def bytes_of(messages: list[Message]) -> int:
    return sum(recorddict_to_proto(message.content).ByteSize() for message in messages)


class Carried:
    """What a grid carries from now on."""

    def __init__(self, grid: LocalGrid) -> None:
        self._grid, self._sent, self._came = grid, len(grid.sent), len(grid.came)

    @property
    def down(self) -> int:
        return bytes_of([message for _, message in self._grid.sent[self._sent :]])

    @property
    def up(self) -> int:
        return bytes_of(self._grid.came[self._came :])


def samples(world: World, *clients: int) -> Forget:
    return Forget.samples({client: world.rows(client)[:30].tolist() for client in clients})


REQUESTS = {
    "client": lambda world: Forget.clients([1]),
    "class": lambda world: Forget.classes([3]),
    "sample": lambda world: samples(world, 2),
    "samples of three": lambda world: samples(world, 0, 2, 3),
}


def losing_one(kind: str):
    """The first answer of a node to a kind of question is lost."""
    lost = iter([True])

    def spoil(node, reply):
        of_use = reply.metadata.group_id == kind and told(reply).status == "ok" and node == FIRST + 2
        return None if of_use and next(lost, False) else reply

    return spoil


@pytest.mark.parametrize("lost", [False, True], ids=["", "a reply is lost"])
@pytest.mark.parametrize("forgets_weights", [False, True], ids=["weights at nodes", "no weights at nodes"])
@pytest.mark.parametrize("privacy", [None, CLEAR], ids=["exact", "DP"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_report_has_the_bytes_that_the_grid_carried(world, name, privacy, forgets_weights, lost):
    grid, request = world.grid(), REQUESTS[name](world)
    contact = world.contact(grid)
    before = Carried(grid)
    store = collect(world.model, contact, privacy=privacy)
    assert (store.traffic.bytes_up, store.traffic.bytes_down) == (before.up, before.down)
    assert store.size_bytes == sum(store.bytes_up.values()) == before.up
    assert store.traffic.messages == len(grid.sent)
    if forgets_weights:
        for node in grid.contexts:
            for key in ("fedup-weights", "fedup-weights-of"):
                del grid.contexts[node].state[key]
    if lost:
        grid.spoil = losing_one("summarize" if privacy is None else "summarize privately")
    plugged = plug(world.model)
    for call in (unlearn, restore):
        carried, sent = Carried(grid), dict(store.bytes_up)
        config = {"config": BOTH if privacy is None else FilterConfig(rank=8, steps=8)} if call is unlearn else {}
        if "sample" not in name:
            config = {"config": FilterConfig(rank=8, steps=8)} if call is unlearn else {}
        report = call(plugged, store, request, clients=contact, **config)
        assert (report.bytes_up, report.bytes_down) == (carried.up, carried.down), call
        assert sum(store.bytes_up.values()) - sum(sent.values()) == carried.up
        if call is unlearn and "sample" not in name:
            assert (report.bytes_up, report.bytes_down, report.releases) == (0, 0, [])
    assert (contact.traffic.bytes_up, contact.traffic.bytes_down) == (before.up, before.down)


def test_weights_that_are_sent_count(world):
    weights = sum(tensor.nbytes for tensor in world.model.state_dict().values())
    store = collect(world.model, world.contact(world.grid(), weights_at_once=True))
    assert 4 * weights < store.traffic.bytes_down < 4 * weights + 20_000


@pytest.mark.parametrize("named", [[], ["all"]], ids=["no request", "who is who"])
def test_refusals_and_questions_who_a_node_is_count(world, named):
    grid = world.grid()
    grid.apps[FIRST + 2] = world.app(2, policy=Policy(ask=lambda kind: "not on Sundays" if kind != "who" else None))
    contact, carried = world.contact(grid, least_fraction=0.5), Carried(grid)
    forget = [Forget.clients([0])] if named else []
    store = collect(world.model, contact, forget=forget)
    assert store.traffic.bytes_up <= carried.up  # those asked who they are before the collection began
    assert (contact.traffic.bytes_up, contact.traffic.bytes_down) == (carried.up, carried.down)
    assert {release.client for release in store.traffic.releases} == set(store.clients) - ({0} if named else set())


def test_bytes_of_a_request_that_failed_count_at_the_contact(world):
    grid = world.grid()
    contact, carried = world.contact(grid, retries=0, timeout_s=0.1), Carried(grid)
    store = collect(world.model, contact)
    grid.spoil = lambda node, reply: None if node == FIRST + 3 else reply
    with pytest.raises(ContactError):
        unlearn(plug(world.model), store, samples(world, 2, 3), clients=contact, config=BOTH)
    assert (contact.traffic.bytes_up, contact.traffic.bytes_down) == (carried.up, carried.down)


@pytest.mark.parametrize("privacy", [None, CLEAR], ids=["exact", "DP"])
def test_in_process_the_bytes_are_those_that_would_be_sent(world, privacy):
    """To nodes that hold the weights. Over Flower a question says besides what a row looks like."""
    grid = world.grid()
    contact = world.contact(grid)
    collect(world.model, contact, statistics=CentroidConfig(seed=9))  # nodes hold the weights now, and are known
    contact.ledger = collect(world.model, world.federation).ledger
    found = []
    for reached in (contact, world.federation):
        store = collect(world.model, reached, privacy=privacy)
        config = BOTH if privacy is None else FilterConfig(rank=8, steps=8)
        report = unlearn(plug(world.model), store, samples(world, 2, 3), clients=reached, config=config)
        found.append([store.traffic.bytes_up, store.traffic.bytes_down, report.bytes_up, report.bytes_down])
        found[-1] += [store.traffic.messages, report.traffic.messages]
        found[-1] += [sorted((one.client, one.what) for one in report.releases)]
    assert found[0][4:] == found[1][4:]
    assert found[0][0::2][:2] == pytest.approx(found[1][0::2][:2], rel=0.01)  # up
    assert found[0][1::2][:2] == pytest.approx(found[1][1::2][:2], abs=60 * max(found[0][4:6]))  # down


@pytest.mark.parametrize("privacy", [None, CLEAR], ids=["exact", "DP"])
def test_the_journal_has_the_bytes_that_the_grid_carried(world, tmp_path, privacy):
    grid = world.grid()
    contact, server = world.contact(grid), RunServer(tmp_path / "run", world.blank)
    server.keep(world.model)
    for call in (
        lambda: server.collect(contact, privacy=privacy),
        lambda: server.unlearn(samples(world, 2), contact, config=FilterConfig(rank=8, steps=8), limits=FORCED),
        lambda: server.restore("R1", contact=contact),
    ):
        carried = Carried(grid)
        call()
        body = server.state.events[-1].body
        assert (body["bytes_up"], body["bytes_down"]) == (carried.up, carried.down)
        assert sum(release["bytes"] for release in body["releases"]) <= body["bytes_up"]
