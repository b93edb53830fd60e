"""The benchmark's row of FedUP as it is shipped: what a user of the library gets, by force only where it refuses."""

import pytest
import torch

from fedup.bench.experiment import Group, Named
from fedup.bench.methods import method_class
from fedup.bench.scenarios import scenario_class
from fedup.bench.shared_setup import SharedSetup
from fedup.clients.collect import collect
from fedup.errors import HarmError
from fedup.filters.bottleneck import FilterConfig
from fedup.serving.plugged import plug
from fedup.tasks.recipe import Recipe
from fedup.unlearning.unlearn import unlearn

CLOSED_FORM = FilterConfig(filter="closed_form")


@pytest.mark.parametrize(("scenario", "rounds"), [("class", 8), ("client", 8), ("client", 1)])
def test_counted_it_serves_what_the_library_serves(scenario, rounds, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDUP_CACHE", str(tmp_path))
    recipe = Recipe.suited_to("digits", rounds=rounds, clients=4, batch_size=32, seed=100)
    named = Named(scenario, scenario, scenario_class(scenario)())
    task = SharedSetup(Group(recipe, named), "cpu", lambda *_: None).task
    answered = method_class("fedup")(filter="closed_form", counted=True).unlearn(task)
    by_hand, store = plug(task.model), collect(task.model, task.federation, statistics="moments")
    try:
        unlearn(by_hand, store, task.request, clients=task.federation, config=CLOSED_FORM)
    except HarmError:
        unlearn(by_hand, store, task.request, clients=task.federation, config=CLOSED_FORM, force=True)
    x = task.federation.x[:200]
    with torch.no_grad():
        assert torch.equal(answered.model(x), by_hand(x))
        assert not torch.equal(answered.model(x), task.model(x))
