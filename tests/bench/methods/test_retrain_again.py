"""The second Retrain: the same rows, and nothing else of the first."""

import dataclasses

import pytest
import torch

from fedup import fingerprint
from fedup.bench.experiment import Group, Named
from fedup.bench.methods import method_class
from fedup.bench.scenarios import scenario_class
from fedup.bench.shared_setup import SharedSetup
from fedup.errors import SettingError
from fedup.tasks.recipe import Recipe


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path))
    recipe = Recipe.suited_to("digits", rounds=2, clients=3, rows=200, batch_size=32)
    return SharedSetup(Group(recipe, Named("class", "class", scenario_class("class")())), "cpu", lambda *_: None).task


def test_it_is_retrain_as_a_federation_of_the_other_seed_would_do_it(task):
    again = method_class("retrain_again")(other_seed=7).unlearn(task)
    recipe = dataclasses.replace(task.recipe, seed=task.recipe.seed + 7)
    start = recipe.blank_model(task.federation.x.shape[1:], task.federation.num_classes)
    by_hand = recipe.train(start, task.federation.without(task.request)).model
    assert fingerprint(again.model) == fingerprint(by_hand)
    assert fingerprint(again.model) != fingerprint(method_class("retrain")().unlearn(task).model)


def test_it_costs_what_retrain_costs(task):
    first, second = (method_class(name)().unlearn(task).cost for name in ("retrain", "retrain_again"))
    assert (second.bytes_up, second.local_steps, second.clients) == (first.bytes_up, first.local_steps, first.clients)


def test_first_weights_are_not_those_of_the_federation(task):
    state = torch.random.get_rng_state()
    recipe = dataclasses.replace(task.recipe, seed=1000)
    start = recipe.blank_model(task.federation.x.shape[1:], task.federation.num_classes)
    assert fingerprint(start) != fingerprint(task.start)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("other_seed", [0, -1])
def test_the_same_seed_would_be_retrain_itself(other_seed):
    with pytest.raises(SettingError, match="1 or more"):
        method_class("retrain_again")(other_seed=other_seed)
