"""Hostile nodes in the benchmark: what it measures is what happened."""

from dataclasses import asdict

import pytest

from fedup.bench.attacks import flower
from fedup.bench.attacks.flower import ATTACKER, CENTROIDS, CONTROL, MOMENTS, Hostile, attacks_on, measure
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
def test_invented_rows_harm_without_checks_and_are_left_out_with_them(world, statistics):
    insider = Insider.of(world.model, find_cut(world.model), world.federation, ATTACKER)
    attack = next(each for each in attacks_on(statistics, insider) if each.name.startswith("400 rows"))
    honest, recalls = measure(world, Hostile("honest", kind="honest"), statistics, None)
    unchecked, _ = measure(world, Hostile(attack.name, attack.nodes, CONTROL), statistics, recalls)
    checked, _ = measure(world, attack, statistics, recalls)
    assert unchecked.retained_accuracy < 0.5 < honest.retained_accuracy - 0.2 and unchecked.worst_class_loss > 50
    assert checked.retained_accuracy > honest.retained_accuracy - 0.03
    assert (checked.named, checked.left_out, unchecked.named) == (True, True, False)
    about = {
        "recipe": {"data": "digits", "model": "m", "clients": 6, "partition": "p", "seed": 0},
        "policy": "leave_out",
    }
    machine = {"machine": {"torch": "2"}, "code": {"commit": None, "changed": False}}
    table = hostile_table([{**about, **machine, "outcomes": [asdict(checked)]}])
    assert f"| {statistics} | fixed | 400 rows a class, next label | {checked.retained_accuracy:.3f} |" in table
