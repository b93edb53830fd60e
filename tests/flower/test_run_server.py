"""A server's memory outlives it, and the operator's commands read it."""

import json
from dataclasses import replace

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.cli._in_process import ok as fedup
from tests.flower._grid import FIRST, LocalGrid, assert_ledgers_agree, spent_by_nodes, told

from fedup import DP, Budget, FilterConfig, Forget
from fedup.errors import BudgetError, RequestError
from fedup.flower import Delivery, GridContact, Policy, RunServer, mount
from fedup.run.answer import Limits
from fedup.tasks.recipe import Recipe

RECIPE = Recipe.suited_to("digits", rounds=1, clients=3, rows=300, batch_size=32, seed=1)

FORCED = Limits(max_loss=None, force=True)


class World:
    """Three nodes over digits, and a model that was trained a little."""

    def __init__(self, folder) -> None:
        self.folder, self.dataset = folder, RECIPE.load()
        self.federation = RECIPE.federation(self.dataset)
        self.model = RECIPE.train(self.blank(), self.federation).model

    def blank(self):
        return RECIPE.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)

    def contact(self, policy: Policy | None = None) -> GridContact:
        self.grid = LocalGrid({FIRST + i: self.node(i, policy) for i in range(3)})
        example = torch.zeros_like(self.dataset.x[:1])
        return GridContact(self.grid, self.model, example=example, num_classes=10)

    def node(self, place: int, policy: Policy | None) -> ClientApp:
        app, rows = ClientApp(), self.federation.clients[place].train
        data = self.federation.x[rows], self.federation.y[rows]
        mount(app, data=lambda _: data, model=self.blank, ids=lambda _: rows.tolist(), policy=policy)
        return app

    def server(self) -> RunServer:
        server = RunServer(self.folder, self.blank, class_names=self.dataset.class_names)
        server.keep(self.model)
        return server

    def logits(self, model):
        return model(self.dataset.test_x[:50])


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "run")


def test_a_server_that_starts_again_serves_the_same_filter_and_asks_nobody(world):
    contact = world.contact()
    first = world.server()
    first.collect(contact)
    first.unlearn(Forget.classes([3]), contact, reference="ticket 7")
    asked = contact.traffic.messages
    second = world.server()
    second.collect(contact)
    assert contact.traffic.messages == asked
    assert torch.equal(world.logits(second.plugged()), world.logits(first.plugged()))
    assert [request.reference for request in second.state.active] == ["ticket 7"]


def test_the_operators_commands_work_on_it(world):
    contact, server = world.contact(), world.server()
    server.collect(contact)
    server.unlearn(Forget.samples({2: world.federation.clients[2].train[:30].tolist()}), contact, limits=FORCED)
    status = json.loads(fedup("status", "--run", world.folder, "--json").out)
    assert [request["id"] for request in status["requests"]] == ["R1"]
    assert "sound as far as it could be checked" in fedup("verify", "--run", world.folder).out
    fedup("evidence", "R1", "--run", world.folder)
    assert (world.folder / "evidence" / "R1.html").exists()


def test_a_model_that_was_trained_anew_needs_a_folder_of_its_own(world):
    world.server()
    other = RECIPE.train(world.blank(), world.federation, rounds=2).model
    with pytest.raises(RequestError, match="another model"):
        RunServer(world.folder, world.blank, class_names=world.dataset.class_names).keep(other)


class Killed(BaseException):
    """As a signal would."""


def killed_at(monkeypatch, where: str) -> None:
    """A server that dies when it comes to that."""

    def kill(*args, **options):
        raise Killed

    monkeypatch.setattr(where, kill)


def answers(folder):
    return sorted(folder.rglob("*.safetensors"))


REAL = DP(100.0, clip=4.0)  # so that few rows stand out of its noise


def private_contact(world, grid, folder):
    return GridContact(grid, world.model, example=torch.zeros_like(world.dataset.x[:1]), num_classes=10, folder=folder)


@pytest.mark.parametrize("where", ["keep_centroids", "ask_clients"], ids=["before it is stored", "at the very start"])
def test_a_server_killed_before_a_collection_is_stored_pays_once_and_leaves_no_answer(
    world, tmp_path, monkeypatch, where
):
    grid, server = LocalGrid({FIRST + i: world.node(i, None) for i in range(3)}), world.server()
    folder = tmp_path / "answers"
    with monkeypatch.context() as patch:
        killed_at(patch, f"fedup.flower.run_server.{where}")
        with pytest.raises(Killed):
            server.collect(private_contact(world, grid, folder), privacy=REAL)
    kept = answers(folder)
    assert len(kept) == (3 if where == "keep_centroids" else 0)
    grid.sent.clear()
    contact = private_contact(world, grid, folder)
    second = world.server()
    second.collect(contact, privacy=REAL)
    assert len(grid.asked("summarize privately")) == (0 if kept else 6)  # a question, and again with the weights
    assert_ledgers_agree(grid, contact)
    charged = [event.body["client"] for event in second.state.events if event.kind in ("charged", "corrected")]
    assert sorted(charged) == [0, 1, 2]
    assert answers(folder) == []
    assert "every release charged" in fedup("verify", "--run", world.folder).out


def test_a_server_killed_before_a_request_is_stored_pays_once_and_leaves_no_answer(world, tmp_path, monkeypatch):
    grid, server, folder = LocalGrid({FIRST + i: world.node(i, None) for i in range(3)}), world.server(), tmp_path / "a"
    server.collect(private_contact(world, grid, folder), privacy=REAL)
    request = Forget.samples({client: world.federation.clients[client].train[:30].tolist() for client in (0, 2)})
    config = FilterConfig(filter="bottleneck", rank=8, steps=5)
    with monkeypatch.context() as patch:
        killed_at(patch, "fedup.run.answer.save_filter")
        with pytest.raises(Killed):
            server.unlearn(request, private_contact(world, grid, folder), config=config)
    assert len(answers(folder)) == 2
    spent, contact, second = spent_by_nodes(grid), private_contact(world, grid, folder), world.server()
    second.collect(contact)  # as a server does when it starts: what waits for a request stays
    second.unlearn(request, contact, config=config)
    assert spent_by_nodes(grid) == spent
    assert_ledgers_agree(grid, contact)
    assert answers(folder) == []
    assert len([event for event in second.state.events if event.kind == "charged"]) == 5
    assert "every release charged" in fedup("verify", "--run", world.folder).out


def test_a_declined_request_that_is_forced_later_pays_once(world, tmp_path):
    grid, server, folder = LocalGrid({FIRST + i: world.node(i, None) for i in range(3)}), world.server(), tmp_path / "a"
    contact = private_contact(world, grid, folder)
    server.collect(contact, privacy=REAL)
    request = Forget.samples({0: world.federation.clients[0].train[:30].tolist()})
    config = FilterConfig(filter="bottleneck", rank=8, steps=5)
    assert server.unlearn(request, contact, config=config, limits=Limits()).declined
    spent = spent_by_nodes(grid)
    assert server.unlearn(request, contact, config=config, limits=Limits(force=True)).declined is None
    assert spent_by_nodes(grid) == spent
    assert_ledgers_agree(grid, contact)
    assert answers(folder) == []


def test_a_release_that_never_came_is_corrected_in_the_journal_once_its_node_is_heard_of(world, tmp_path):
    grid, server = LocalGrid({FIRST + i: world.node(i, None) for i in range(3)}), world.server()
    grid.spoil = lambda node, reply: None if node == FIRST + 1 and told(reply).status == "ok" else reply
    example, delivery = torch.zeros_like(world.dataset.x[:1]), Delivery(timeout_s=0.1, retries=0)
    contact = GridContact(grid, world.model, example=example, num_classes=10, delivery=delivery)
    with pytest.raises(RequestError, match="2 of 3"):
        server.collect(contact, privacy=REAL)
    grid.spoil = lambda node, reply: reply
    other = replace(REAL, epsilon=1.0)
    server.collect(contact, privacy=other)
    assert_ledgers_agree(grid, contact)
    (corrected,) = [event.body for event in server.state.events if event.kind == "corrected"]
    assert (corrected["client"], corrected["mu"]) == (1, pytest.approx(REAL.mu))
    told_of = json.loads(fedup("status", "--run", world.folder, "--json").out)["ledger"]
    assert [one["corrections"] for one in told_of] == [0, 1, 0]
    assert [one["releases"] for one in told_of] == [2, 1, 2]
    assert "every release charged" in fedup("verify", "--run", world.folder).out


def test_noise_that_can_be_replayed_is_no_guarantee_anywhere(world, tmp_path):
    contact, server = world.contact(), world.server()
    server.collect(contact, privacy=replace(REAL, replay_seed=1))
    assert server.state.guarantee is None
    body = server.state.collected.body
    assert body["guarantee"] is None
    assert {release["guarantee"] for release in body["releases"]} == {None}
    assert all(charge.replayable for charge in contact.ledger.charges)
    clients = json.loads(fedup("status", "--run", world.folder, "--json").out)["ledger"]
    assert all(one["test_mode"] and one["unprotected"] == 1 for one in clients)


def test_a_budget_that_is_spent_refuses_at_the_node_and_the_folder_stays_as_it_was(world):
    contact, server = world.contact(Policy(budget=Budget(1.0))), world.server()
    before = server.state.head
    with pytest.raises(RequestError, match="spent") as refused:
        server.collect(contact, privacy=DP(2.0, clip="unit"))
    assert not isinstance(refused.value, BudgetError)  # the server has no account of theirs
    assert server.state.head == before
