"""Hostile nodes in the benchmark: what it measures is what happened."""

from dataclasses import asdict
from statistics import fmean

import pytest

from fedup.bench.attacks import flower
from fedup.bench.attacks.flower import (
    ATTACKER,
    CENTROIDS,
    CONTROL,
    HONEST,
    MOMENTS,
    PRIVATE,
    Hostile,
    attacks_on,
    measure,
)
from fedup.bench.attacks.flower_answers import Insider
from fedup.bench.attacks.flower_table import hostile_table
from fedup.bench.attacks.flower_world import World
from fedup.models.cut import find_cut
from fedup.tasks.recipe import Recipe


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDUP_CACHE", str(tmp_path_factory.mktemp("cache")))
        recipe = Recipe.suited_to("digits", rounds=8, clients=6, rows=900, partition=flower.PARTITION)
        yield World.of(recipe, lambda *_: None)


@pytest.mark.parametrize("statistics", [MOMENTS, pytest.param(CENTROIDS, marks=pytest.mark.slow)])
def test_invented_rows_end_a_request_without_checks_and_are_left_out_with_them(world, statistics):
    insider = Insider.of(world.model, find_cut(world.model), world.federation, ATTACKER)
    attack = next(each for each in attacks_on(statistics, insider) if each.name.startswith("400 rows"))
    honest, recalls = measure(world, Hostile(HONEST, kind=HONEST), statistics, None)
    unchecked, _ = measure(world, Hostile(attack.name, attack.nodes, CONTROL), statistics, recalls)
    checked, _ = measure(world, attack, statistics, recalls)
    assert unchecked.refused and unchecked.retained_accuracy < honest.retained_accuracy - 0.1, "clients count harm"
    assert checked.retained_accuracy > honest.retained_accuracy - 0.03
    assert (checked.named, checked.left_out, checked.refused, unchecked.named) == (True, True, False, False)
    about = {
        "recipe": {"data": "digits", "model": "m", "clients": 6, "partition": "p", "seed": 0},
        "policy": "leave_out",
    }
    machine = {"machine": {"torch": "2"}, "code": {"commit": None, "changed": False}}
    table = hostile_table([{**about, **machine, "outcomes": [asdict(checked)]}])
    assert f"| {statistics} | fixed | 400 rows a class, next label | 1 | {checked.retained_accuracy:.3f} |" in table


@pytest.mark.slow
def test_under_noise_the_figures_are_of_means_over_draws_and_never_above_the_mean_of_single_draws(world):
    honest, recalls = measure(world, Hostile(HONEST, kind=HONEST), PRIVATE, None, draws=3, again=False)
    other, again = measure(world, Hostile(HONEST, kind=HONEST, noise=3), PRIVATE, recalls, draws=3, again=False)
    assert honest.losses == (0.0,) * 3 and honest.worst_class_loss == 0 and len(recalls) == len(again) == 3
    means = [[fmean(own[label] for own in drawn) for label in range(10)] for drawn in (recalls, again)]
    lost = [100 * (was - now) for was, now in zip(*means, strict=True)]
    assert other.worst_class_loss == pytest.approx(max(lost)) and other.loss_error > 0
    assert 0 <= other.worst_class_loss <= sum(other.losses) / 3 and other.retained_accuracy == fmean(other.accuracies)
