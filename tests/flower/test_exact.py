"""Exact mode over Flower: the same messages, and totals as of learning without the data in process."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.cli._in_process import ok as fedup_command
from tests.flower._contact import spoiling
from tests.flower._grid import FIRST, World, changed, digits, told
from tests.flower.exact_app.exactly import task

import fedup
from fedup import Forget, HeadModel, learn_head, with_blank_head
from fedup.clients.moments import MomentsQuestion
from fedup.errors import ContactError
from fedup.flower import HeadServer, Policy
from fedup.request import union
from fedup.tasks.backbones import load_backbone
from fedup.tasks.recipe import Recipe


@pytest.fixture(scope="module")
def world() -> World:
    return digits(rounds=0, rows=400)


def blank():
    return with_blank_head(load_backbone("random_conv", (1, 14, 14), features=24), 10)


def learned(world: World, **settings) -> tuple[HeadModel, object]:
    contact = world.contact(world.grid(model=blank, **settings), blank())
    return learn_head(blank()[0], contact, num_classes=10), contact


def test_forgotten_over_flower_in_any_order_the_totals_are_learned_without_the_data_in_process(world):
    model, contact = learned(world, policy=Policy(few_rows=True))
    requests = [Forget.clients([3]), Forget.classes([4]), world.samples(c1=1), world.samples(c0=7)]
    for seed in range(3):
        order = random.Random(seed).sample(requests, len(requests))
        for request in order:
            fedup.unlearn(model, model.store, request, clients=contact)
            without = world.federation.without(union(model.requests))
            assert model.totals == learn_head(model.backbone, without, num_classes=10).totals
        assert model.relearn(contact) == model.totals
        if seed == 1:
            model.purge()
            assert model.claim.kind == "exact"
        fedup.restore(model, model.store, order, clients=contact)
    assert model.totals == learn_head(model.backbone, world.federation, num_classes=10).totals


def test_sums_of_few_rows_need_the_nodes_consent(world):
    model, contact = learned(world)
    own, y = world.rows(1), world.federation.y
    label = int(y[own].bincount(minlength=10).argmax())
    before = int(model.totals.counts[label])
    sample = Forget.samples({1: own[y[own] == label][:1].tolist()})
    assert sum(model.store.unreported.values()) > 0  # classes of which a node has fewer than five rows
    fedup.unlearn(model, model.store, sample, clients=contact)
    assert before - int(model.totals.counts[label]) == int((y[own] == label).sum()) > 1  # never one row alone
    assert model.claim.kind == "suppressed"


def test_a_node_that_joins_later_is_as_if_it_had_been_there_from_the_start(world):
    grid = world.grid(model=blank, policy=Policy(few_rows=True))
    late = max(grid.apps)
    app = grid.apps.pop(late)
    contact = world.contact(grid, blank())
    model = learn_head(blank()[0], contact, num_classes=10)
    fedup.unlearn(model, model.store, Forget.classes([4]), clients=contact)
    grid.apps[late] = app
    model.add_clients(contact, [3])
    without = world.federation.without(Forget.classes([4]))
    assert model.totals == learn_head(model.backbone, without, num_classes=10).totals
    fedup.unlearn(model, model.store, Forget.clients([3]), clients=contact)
    assert model.relearn(contact) == model.totals


def test_labels_beyond_the_declared_set_are_refused_by_the_node_that_has_them(world):
    def five():
        return with_blank_head(load_backbone("random_conv", (1, 14, 14), features=24), 5)

    contact = world.contact(world.grid(model=five), five(), num_classes=5)
    with pytest.raises(ContactError, match="labels beyond the 5 declared classes"):
        learn_head(five()[0], contact, num_classes=5)


def served_by(folder, **settings) -> HeadServer:
    return HeadServer(folder, lambda: blank()[0], class_names=[f"digit {label}" for label in range(10)], **settings)


@pytest.mark.parametrize("keep", ["clients", "cohort"])
def test_a_servers_folder_answers_after_restarts_and_the_operators_commands_read_it(world, tmp_path, keep):
    run, grid = tmp_path / "run", world.grid(model=blank, policy=Policy(few_rows=True))
    late = grid.apps.pop(max(grid.apps))
    contact = world.contact(grid, blank(), folder=tmp_path / "answers")
    served_by(run, keep=keep).learn(contact)
    asked = contact.traffic.messages
    served_by(run, keep=keep).learn(contact)  # a server that starts again
    assert contact.traffic.messages == asked
    requests = [Forget.clients([2]), *([Forget.classes([4]), world.samples(c1=2)] if keep == "clients" else [])]
    for number, request in enumerate(requests):
        served_by(run, keep=keep).unlearn(request, contact, reference=f"ticket {number}")
    grid.apps[max(grid.apps) + 1] = late
    outcome = served_by(run, keep=keep).add_clients(contact, [3])
    server, without = served_by(run, keep=keep), world.federation.without(union(requests))
    model = server.model()
    assert model.totals == learn_head(model.backbone, without, num_classes=10).totals and outcome.claim is not None
    assert server.relearned(contact) and all(check.ok for check in server.verify())
    server.purge()
    assert server.model().claim.kind == "exact" and server.relearned(contact)
    assert json.loads(fedup_command("status", "--run", run, "--json").out)["claim"] == "exact"
    assert "sound as far as it could be checked" in fedup_command("verify", "--run", run).out
    page = fedup_command("evidence", "R1", "--run", run, "--json").json
    assert page["claim"]["kind"] == "exact" and page["claim"]["totals"]["before"] != page["claim"]["totals"]["after"]
    server.restore(*(f"R{number + 1}" for number in range(len(requests))), contact=contact)
    assert server.model().totals == learn_head(model.backbone, world.federation, num_classes=10).totals


def test_a_node_that_is_away_holds_up_nothing_and_nothing_exact_is_claimed_meanwhile(world, tmp_path):
    grid = world.grid(model=blank, policy=Policy(few_rows=True))
    contact = world.contact(grid, blank(), timeout_s=0.1, retries=0)
    server = served_by(tmp_path / "run")
    server.learn(contact)
    grid.spoil = lambda node, reply: None if node == FIRST + 1 else reply
    answered = server.unlearn(world.samples(c1=2), contact)
    assert answered.claim["kind"] == "suppressed" and "did not answer" in str(answered.claim["conditions"])
    grid.spoil = lambda node, reply: reply
    server.unlearn(Forget.clients([2]), contact)
    server.purge()
    assert server.model().claim.kind == "exact" and server.relearned(contact)


@pytest.mark.slow
def test_in_flowers_simulation_totals_are_those_learned_without_the_data_in_process(tmp_path, monkeypatch):
    app, root = Path(__file__).parent / "exact_app", Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "examples" / "flower-app"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from run import Processes, serve

    home = tmp_path / "home"
    home.mkdir()
    processes = Processes(home, tmp_path, 300)
    try:
        serve(processes, "simulation", home, task.NODES)
        nodes = ["--federation-config", f"num-supernodes={task.NODES}"]
        processes.call("flwr", "run", str(app), "fedup", "--stream", "-c", f'out="{tmp_path}"', *nodes)
    finally:
        processes.stop()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 6 and found[2]["relearned"] and found[5]["relearned"]
    for own in found:
        without = task.federation().without(union(map(Forget.from_json, own["requests"])))
        assert own["totals"] == learn_head(task.backbone(), without, num_classes=task.CLASSES).totals_hash()


def test_in_exact_mode_a_node_with_wrong_labels_is_found_by_its_features_and_no_lie_about_the_grid_ends_it():
    """The head is blank, so that it is no witness: it answers class 0 to everything."""
    recipe, liar = Recipe.suited_to("digits", rounds=0, clients=8, partition="dirichlet:1"), 1
    whole = recipe.federation(recipe.load())
    small = replace(whole, x=whole.x[..., ::2, ::2].contiguous())
    world = World(small, blank(), small.x)
    rows = world.rows(liar)

    def all_shortened(reply):
        return changed(reply, {"shortened": sum(count for _, count in told(reply).details["rows"])})

    for lie in ("none", "class 0", "all shortened"):
        grid, found = world.grid(model=blank), lie == "class 0"
        if lie == "class 0":
            data = world.federation.x[rows], torch.zeros_like(world.federation.y[rows])
            grid.apps[FIRST + liar] = world.app(liar, model=blank, data=lambda context, data=data: data)
        if lie == "all shortened":
            grid.spoil = spoiling(all_shortened, FIRST + liar, MomentsQuestion.kind)
        for keep in ("clients", "cohort"):
            contact = world.contact(grid, blank())
            learn_head(blank()[0], contact, num_classes=10, keep=keep)
            assert set(contact.flagged) == set(contact.left_out) == ({FIRST + liar} if found else set()), (lie, keep)
