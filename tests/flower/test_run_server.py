"""A server's memory outlives it, and the operator's commands read it."""

import json
from dataclasses import replace

import pytest
import torch
from tests.cli._in_process import ok as fedup
from tests.flower._grid import (
    FIRST,
    Killed,
    LocalGrid,
    World,
    assert_ledgers_agree,
    digits,
    kept_answers,
    spent_by_nodes,
    told,
)
from torch import nn

from fedup import DP, Budget, FilterConfig, Forget
from fedup.errors import BudgetError, RequestError
from fedup.flower import GridContact, Policy, RunServer
from fedup.run.ledger import ledger_of
from fedup.run.limits import Limits

FORCED = Limits(max_loss=None, force=True)
REAL = DP(100.0, clip=4.0)  # so that few rows stand out of its noise
POOR = FilterConfig(filter="bottleneck", rank=8, steps=5)


class Setting:
    """Nodes, and the folder of a run, in which answers wait."""

    def __init__(self, world: World, folder, **settings) -> None:
        self.world, self.run = world, folder / "run"
        self.grid: LocalGrid = world.grid(**settings)

    def contact(self, **settings) -> GridContact:
        return self.world.contact(self.grid, **settings)

    def server(self, model: nn.Module | None = None) -> RunServer:
        server = RunServer(self.run, self.world.blank, class_names=[f"digit {label}" for label in range(10)])
        server.keep(model or self.world.model)
        return server

    @property
    def answers(self) -> list:
        return kept_answers(self.run)

    def status(self) -> dict:
        return json.loads(fedup("status", "--run", self.run, "--json").out)

    def assert_charged(self, contact: GridContact, server: RunServer, clients: list[int]) -> None:
        """Each release once, at the node, at the server and in the journal; and no answer waits any more."""
        assert_ledgers_agree(self.grid, contact)
        assert sorted(charge.client for charge in ledger_of(server.state).charges) == clients
        assert self.answers == [] and not [*(self.run / "answers").rglob("*")]
        assert "every release charged" in fedup("verify", "--run", self.run).out


@pytest.fixture
def setting(world, tmp_path) -> Setting:
    return Setting(world, tmp_path)


def test_a_server_that_starts_again_serves_the_same_filter_and_asks_nobody(setting, world):
    contact, first = setting.contact(), setting.server()
    first.collect(contact)
    first.unlearn(Forget.classes([3]), contact, reference="ticket 7", limits=FORCED)
    asked, second = contact.traffic.messages, setting.server()
    second.collect(contact)
    assert contact.traffic.messages == asked
    assert torch.equal(second.plugged()(world.test_x[:50]), first.plugged()(world.test_x[:50]))
    assert [request.reference for request in second.state.active] == ["ticket 7"]
    second.unlearn(world.samples(c2=30), contact, limits=FORCED)  # and the operator's commands work on it
    assert [request["id"] for request in setting.status()["requests"]] == ["R1", "R2"]
    assert "The folder is sound." in fedup("verify", "--run", setting.run).out  # the model's code was found, too
    fedup("evidence", "R2", "--run", setting.run)
    assert (setting.run / "evidence" / "R2.html").exists()
    with pytest.raises(RequestError, match="another model"):  # one that was trained anew needs a folder of its own
        setting.server(digits(1).model)


def killed_at(monkeypatch, where: str, call) -> None:
    """A server that dies when it comes to that."""

    def kill(*args, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(where, kill)
        with pytest.raises(Killed):
            call()


@pytest.mark.parametrize("where", ["keep_centroids", "ask_clients"], ids=["before it is stored", "at the very start"])
def test_a_server_killed_before_a_collection_is_stored_pays_once_and_leaves_no_answer(setting, monkeypatch, where):
    server = setting.server()
    killed_at(
        monkeypatch,
        f"fedup.flower.run_server.{where}",
        lambda: server.collect(setting.contact(), privacy=REAL),
    )
    waiting = setting.answers
    assert len(waiting) == (4 if where == "keep_centroids" else 0)
    setting.grid.sent.clear()
    contact, second = setting.contact(), setting.server()
    second.collect(contact, privacy=REAL)
    assert len(setting.grid.asked("summarize privately")) == (0 if waiting else 8)  # a question, again with the weights
    setting.assert_charged(contact, second, [0, 1, 2, 3])


def test_a_server_killed_before_a_request_is_stored_pays_once_and_leaves_no_answer(setting, world, monkeypatch):
    server, request = setting.server(), world.samples(c0=30, c2=30)
    server.collect(setting.contact(), privacy=REAL)
    killed_at(
        monkeypatch,
        "fedup.run.answer.save_filter",
        lambda: server.unlearn(request, setting.contact(), config=POOR, limits=FORCED),
    )
    assert len(setting.answers) == 2
    spent, contact, second = spent_by_nodes(setting.grid), setting.contact(), setting.server()
    second.collect(contact)  # as a server does when it starts: what waits for a request stays
    second.unlearn(request, contact, config=POOR, limits=FORCED)
    assert spent_by_nodes(setting.grid) == spent
    setting.assert_charged(contact, second, [0, 0, 1, 2, 2, 3])


def test_a_declined_request_that_is_forced_later_pays_once(setting, world):
    server, contact, request = setting.server(), setting.contact(), world.samples(c0=30)
    server.collect(contact, privacy=REAL)
    assert server.unlearn(request, contact, config=POOR, limits=Limits()).declined
    spent = spent_by_nodes(setting.grid)
    assert server.unlearn(request, contact, config=POOR, limits=Limits(force=True)).declined is None
    assert spent_by_nodes(setting.grid) == spent
    setting.assert_charged(contact, server, [0, 0, 1, 2, 3])


def test_a_release_that_never_came_is_corrected_in_the_journal_once_its_node_is_heard_of(setting):
    server, contact = setting.server(), setting.contact(timeout_s=0.1, retries=0)
    setting.grid.spoil = lambda node, reply: None if node == FIRST + 1 and told(reply).status == "ok" else reply
    with pytest.raises(RequestError, match="3 of 4"):
        server.collect(contact, privacy=REAL)
    setting.grid.spoil = lambda node, reply: reply
    server.collect(contact, privacy=replace(REAL, epsilon=1.0))
    (corrected,) = [event.body for event in server.state.events if event.kind == "corrected"]
    assert (corrected["client"], corrected["mu"]) == (1, pytest.approx(REAL.mu))
    assert [one["corrections"] for one in setting.status()["ledger"]] == [0, 1, 0, 0]
    assert [one["releases"] for one in setting.status()["ledger"]] == [2, 1, 2, 2]
    setting.assert_charged(contact, server, [0, 0, 1, 1, 2, 2, 3, 3])


def test_noise_that_can_be_replayed_is_no_guarantee_anywhere(setting):
    contact, server = setting.contact(), setting.server()
    server.collect(contact, privacy=replace(REAL, replay_seed=1))
    body = server.state.collected.body
    assert server.state.guarantee is body["guarantee"] is None
    assert {release["guarantee"] for release in body["releases"]} == {None}
    assert all(charge.replayable for charge in contact.ledger.charges)
    assert all(one["test_mode"] and one["unprotected"] == 1 for one in setting.status()["ledger"])


def test_a_budget_that_is_spent_refuses_at_the_node_and_the_folder_stays_as_it_was(world, tmp_path):
    setting = Setting(world, tmp_path, policy=Policy(budget=Budget(1.0)))
    server = setting.server()
    before = server.state.head
    with pytest.raises(RequestError, match="spent") as refused:
        server.collect(setting.contact(), privacy=DP(2.0, clip="unit"))
    assert not isinstance(refused.value, BudgetError)  # the server has no account of theirs
    assert server.state.head == before
