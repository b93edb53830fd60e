"""Exact mode over Flower: the same messages, and totals as of learning without the data in process."""

import random

import pytest
from tests.flower._grid import World, digits

import fedup
from fedup import Forget, HeadModel, learn_head, with_blank_head
from fedup.errors import ContactError
from fedup.flower import Policy
from fedup.request import union
from fedup.tasks.backbones import load_backbone


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
