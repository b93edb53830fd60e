"""Nodes that go away and come back: over messages as in process, and in a run folder."""

import json
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from tests._absent import Absent
from tests.cli._in_process import ok as fedup
from tests.flower._contact import ODD, refused, spoiling, untouched
from tests.flower._grid import FIRST, Clock, changed, digits, told

from fedup import Forget, Terms, collect, finish_pending, plug, unlearn
from fedup.clients.moments import MomentChangeQuestion, _from_bytes, _to_bytes
from fedup.flower import Policy, RunServer, messaging
from fedup.run.limits import Limits
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig

WORLD = digits()
REQUESTS = {
    "samples": WORLD.samples(c1=25),
    "samples of two": WORLD.samples(c0=3, c2=22),
    "class": Forget.classes([3]),
    "client": Forget.clients([0]),
}
FORCED = Limits(max_loss=None, force=True)


@pytest.fixture(autouse=True, scope="module")
def nobody_waits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messaging, "time", Clock())
        yield


def lossy(world, away):
    """A grid that loses the replies of nodes that are away."""
    policy = Policy(few_rows=True)
    return world.grid(lambda node, reply: None if node - FIRST in away else reply, policy=policy)


class OverFlower(Absent):
    base, federation, requests = WORLD.model, WORLD.federation, REQUESTS

    def reach(self):
        """Often a server that was started again: it has not met the nodes that are away."""
        if not hasattr(self, "contact") or len(self.away) < 2:
            self.contact = WORLD.contact(lossy(WORLD, self.away), retries=0)
        return self.contact


class WithCentroids(OverFlower):
    statistics: ClassVar = CentroidConfig(ratio=0.5)
    references: ClassVar = {}


class WithMoments(OverFlower):
    statistics: ClassVar = MomentConfig(least_rows=1)
    references: ClassVar = {}


TestCentroids, TestMoments = WithCentroids.TestCase, WithMoments.TestCase
TestCentroids.settings = TestMoments.settings = settings(
    max_examples=4, stateful_step_count=8, deadline=None, derandomize=True, phases=[Phase.generate]
)  # to shrink a failure would take minutes


@pytest.mark.parametrize("statistics", ["centroids", "moments"])
def test_a_node_that_is_away_blocks_nobody_and_its_part_is_shown_until_it_is_back(world, tmp_path, statistics):
    away, path = set(), tmp_path / "run"
    contact, server = world.contact(lossy(world, away), retries=0), RunServer(path, world.blank)
    server.keep(world.model)
    server.collect(contact, statistics=statistics)
    server.unlearn(REQUESTS["samples"], contact, limits=FORCED)
    away |= {1, 2}
    outcome = server.unlearn(Forget.classes([3]), contact, limits=FORCED)  # needs none of those asked before
    assert outcome.declined is None and server.state.forgets == {REQUESTS["samples"], Forget.classes([3])}
    server.unlearn(REQUESTS["samples of two"], contact, limits=FORCED)
    status = json.loads(fedup("status", "--run", path, "--json").out)
    assert 2 in [part["client"] for part in status["pending"]]
    assert "Client 2 has not answered" in fedup("status", "--run", path).out
    fedup("evidence", "R3", "--run", path)
    shown = json.loads((path / "evidence" / "R3.json").read_text())
    assert [part for part in shown["pending"] if part["client"] == 2]
    assert "its part is pending" in (path / "evidence" / "R3.html").read_text()
    asked_at = [request["asked_at"] for request in status["requests"]]
    away.clear()
    assert server.answer_queued(contact) == []  # a server that looks at its queue also finishes what is pending
    status = json.loads(fedup("status", "--run", path, "--json").out)
    assert status["pending"] == [] and [request["asked_at"] for request in status["requests"]] == asked_at
    assert "sound" in fedup("verify", "--run", path).out
    messages = contact.traffic.messages
    assert server.finish_pending(contact).requests == [] and contact.traffic.messages == messages


def times_three(reply):
    """As if what leaves were three times as long: then what stays are sums of no rows."""
    arrays, powers = told(reply).arrays, {"leaving/sums": 3, "leaving/by_class": 9}
    own = {name: _from_bytes(arrays, name, tuple(arrays[name].shape[:-1])) for name in powers if name in arrays}
    return changed(reply, **{name: _to_bytes(powers[name] * numbers) for name, numbers in own.items()})


@pytest.mark.parametrize(
    ("kind", "lie"), [("labels", refused), (MomentChangeQuestion.kind, times_three), ("labels", None)]
)
def test_a_part_that_was_pending_and_is_answered_with_nonsense_stays_pending_and_holds_up_no_other(kind, lie):
    grid, plugged = WORLD.grid(policy=Policy(few_rows=True)), plug(WORLD.model)
    contact = WORLD.contact(grid, retries=0)
    store = collect(WORLD.model, contact, statistics="moments")
    options = {"clients": contact, "force": True, "terms": Terms(measure=False)}
    grid.spoil = lambda node, reply: None if node in (ODD, ODD - 1) else reply
    assert unlearn(plugged, store, WORLD.samples(c1=12, c2=12), **options).pending.keys() == {1, 2}
    grid.spoil = untouched if lie is None else spoiling(lie, kind=kind)
    left = set() if lie is None else {ODD - FIRST}
    assert finish_pending(plugged, store, **options).pending.keys() == left == set(store.clients_out)


@pytest.mark.parametrize("instead", [lambda reply: None, refused], ids=["no reply", "a refusal"])
def test_a_node_that_gives_no_counts_is_waited_for_once(instead):
    """It would hold up every filter that is tried, and every step to better biases, or use up its refusals."""

    def withheld(node, reply):
        counts = {"retained", "held_out"} <= told(reply).details.keys()
        return instead(reply) if node == FIRST + 2 and counts else reply

    grid = WORLD.grid(withheld)
    contact, plugged = WORLD.contact(grid, retries=0), plug(WORLD.model)
    store = collect(WORLD.model, contact, statistics=MomentConfig(least_rows=1))
    unlearn(plugged, store, Forget.clients([0]), clients=contact, terms=Terms(max_class_loss=0.1), force=True)
    asked = [node for node, _ in grid.asked("tally", "biases")]
    assert asked.count(FIRST + 2) == 1 < asked.count(FIRST + 1)
