"""The second Retrain: the same rows, and nothing else of the first."""

import dataclasses

import pytest
import torch

from fedup import fingerprint
from fedup.bench.experiment import Group, Named
from fedup.bench.methods import method_class
from fedup.bench.scenarios import scenario_class
from fedup.bench.shared_setup import SharedSetup
from fedup.tasks.recipe import Recipe


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path))
    recipe = Recipe.suited_to("digits", rounds=2, clients=3, rows=200, batch_size=32)
    return SharedSetup(Group(recipe, Named("class", "class", scenario_class("class")())), "cpu", lambda *_: None).task


def test_it_is_retrain_as_a_federation_of_the_other_seed_would_do_it_at_retrains_cost(task):
    state = torch.random.get_rng_state()
    again, first = method_class("retrain_again")(other_seed=7).unlearn(task), method_class("retrain")().unlearn(task)
    recipe = dataclasses.replace(task.recipe, seed=task.recipe.seed + 7)
    start = recipe.blank_model(task.federation.x.shape[1:], task.federation.num_classes)
    by_hand = recipe.train(start, task.federation.without(task.request)).model
    assert fingerprint(again.model) == fingerprint(by_hand) != fingerprint(first.model)
    ours, theirs = again.cost, first.cost
    assert (ours.bytes_up, ours.local_steps, ours.clients) == (theirs.bytes_up, theirs.local_steps, theirs.clients)
    assert torch.equal(torch.random.get_rng_state(), state)
