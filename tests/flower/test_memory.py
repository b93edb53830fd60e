"""A server's memory outlives it, and the operator's commands read it."""

import json

import pytest
import torch
from flwr.clientapp import ClientApp
from tests.cli._in_process import ok as fedup
from tests.flower._grid import LocalGrid

from fedup import DP, Budget, Forget
from fedup.bench.recipe import Recipe
from fedup.errors import BudgetError, RequestError
from fedup.flower import GridContact, Policy, RunMemory, mount

RECIPE = Recipe.suited_to("digits", rounds=1, clients=3, rows=300, batch_size=32, seed=1)


class World:
    """Three nodes over digits, and a model that was trained a little."""

    def __init__(self, folder) -> None:
        self.folder, self.dataset = folder, RECIPE.load()
        self.federation = RECIPE.federation(self.dataset)
        self.model = RECIPE.train(self.blank(), self.federation).model

    def blank(self):
        return RECIPE.blank_model(self.dataset.x.shape[1:], self.dataset.num_classes)

    def contact(self, policy: Policy | None = None) -> GridContact:
        self.grid = LocalGrid({10 + i: self.node(i, policy) for i in range(3)})
        example = torch.zeros_like(self.dataset.x[:1])
        return GridContact(self.grid, self.model, example=example, num_classes=10)

    def node(self, place: int, policy: Policy | None) -> ClientApp:
        app, rows = ClientApp(), self.federation.clients[place].train
        data = self.federation.x[rows], self.federation.y[rows]
        mount(app, data=lambda _: data, model=self.blank, ids=lambda _: rows.tolist(), policy=policy)
        return app

    def memory(self) -> RunMemory:
        memory = RunMemory(self.folder, self.blank, class_names=self.dataset.class_names)
        memory.keep(self.model)
        return memory

    def logits(self, model):
        return model(self.dataset.test_x[:50])


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "run")


def test_a_server_that_starts_again_serves_the_same_filter_and_asks_nobody(world):
    contact = world.contact()
    first = world.memory()
    first.collect(contact)
    first.unlearn(Forget.classes([3]), contact, reference="ticket 7")
    asked = contact.messages
    second = world.memory()
    second.collect(contact)
    assert contact.messages == asked
    assert torch.equal(world.logits(second.plugged()), world.logits(first.plugged()))
    assert [request.reference for request in second.state.active] == ["ticket 7"]


def test_what_is_taken_back_gives_the_original_bit_for_bit(world):
    contact, memory = world.contact(), world.memory()
    memory.collect(contact)
    memory.unlearn(Forget.clients([1]), contact)
    memory.restore("R1", contact=contact)
    with memory.plugged().restored() as original:
        assert torch.equal(world.logits(original), world.logits(world.model))
    assert not memory.state.active


def test_the_operators_commands_work_on_it(world):
    contact, memory = world.contact(), world.memory()
    memory.collect(contact)
    memory.unlearn(Forget.samples({2: world.federation.clients[2].train[:30].tolist()}), contact)
    told = json.loads(fedup("status", "--run", world.folder, "--json").out)
    assert [request["id"] for request in told["requests"]] == ["R1"]
    assert "sound as far as it could be checked" in fedup("verify", "--run", world.folder).out
    fedup("evidence", "R1", "--run", world.folder)
    assert (world.folder / "evidence" / "R1.html").exists()


def test_the_program_itself_checks_what_the_command_cannot(world):
    contact, memory = world.contact(), world.memory()
    memory.collect(contact)
    memory.unlearn(Forget.classes([0]), contact)
    checks = {check.name: check.ok for check in memory.verify(world.dataset.test_x[:8])}
    assert checks["model"] and checks["filter"] and checks["restore"] and False not in checks.values()


def test_a_model_that_was_trained_anew_needs_a_folder_of_its_own(world):
    world.memory()
    other = RECIPE.train(world.blank(), world.federation, rounds=2).model
    with pytest.raises(RequestError, match="another model"):
        RunMemory(world.folder, world.blank, class_names=world.dataset.class_names).keep(other)


def test_releases_under_dp_are_charged_in_the_journal(world):
    contact, memory = world.contact(Policy(budget=Budget(3.0))), world.memory()
    memory.collect(contact, privacy=DP(2.0, clip="unit"))
    charged = [event.body["client"] for event in memory.state.events if event.kind == "charged"]
    assert sorted(charged) == [0, 1, 2]
    assert "every release charged" in fedup("verify", "--run", world.folder).out


def test_a_budget_that_is_spent_refuses_at_the_node_and_the_folder_stays_as_it_was(world):
    contact, memory = world.contact(Policy(budget=Budget(1.0))), world.memory()
    before = memory.state.head
    with pytest.raises(RequestError, match="spent") as refused:
        memory.collect(contact, privacy=DP(2.0, clip="unit"))
    assert not isinstance(refused.value, BudgetError)  # the server has no account of theirs
    assert memory.state.head == before
