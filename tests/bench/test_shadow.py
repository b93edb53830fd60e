"""The authors' membership inference: the shadow model sees no row of any other training, and logits alone decide."""

from dataclasses import replace

import pytest
import torch

from fedup.bench.experiment import Group, Named
from fedup.bench.metrics.mia_authors import _attack, _balanced
from fedup.bench.scenarios import scenario_class
from fedup.bench.shadow import held_out_federation
from fedup.bench.shared_setup import SharedSetup
from fedup.tasks.recipe import Recipe

RECIPE = Recipe.suited_to("digits", rounds=1, clients=4, rows=900, seed=3)


@pytest.mark.parametrize("scenario", ["class", "client", "sample"])
def test_a_shadow_model_trains_on_held_out_rows_of_what_is_retained(cache, scenario):
    group = Group(RECIPE, Named(scenario, scenario, scenario_class(scenario)()), shadow=True)
    setup = SharedSetup(group, "cpu", lambda *step: None)
    federation, request = setup.situation.federation, setup.situation.request
    rows = held_out_federation(federation, request).rows()
    assert torch.equal(rows, federation.retained(request, "heldout")) and len(rows) > 40
    assert not torch.isin(rows, federation.rows("train")).any()
    forgotten, retained = setup.data.shadow.logits
    assert len(retained) == len(rows) and len(forgotten) > 10
    assert SharedSetup(replace(group, shadow=False), "cpu", lambda *step: None).data.shadow is None


def test_the_attack_finds_what_differs_and_nothing_where_nothing_does():
    source = torch.Generator().manual_seed(0)
    alike, other = torch.randn(4, 300, 10, generator=source).unbind()[:2], torch.randn(2, 300, 10, generator=source)
    apart = other + torch.tensor([[[4.0] + 9 * [0.0]], [[0.0] * 10]])
    assert _attack(_balanced(*apart), _balanced(*apart)) > 0.95
    assert 0.4 < _attack(_balanced(*alike), _balanced(*other)) < 0.6
    masked = apart[0].clone()
    masked[:, 3] = -torch.inf  # a removed logit
    assert _attack(_balanced(masked, apart[1]), _balanced(masked, apart[1])) > 0.95
    assert _balanced(alike[0][:39], alike[1]) is None
