"""Seconds of missing cells: those of like cells, scaled by what sharing cost; a guess says that it is one."""

from dataclasses import replace

import pytest

from fedup.bench.reproduction.estimate import Estimator

TOML = """
[[federations]]
data = "mnist"
rounds = 10
rows = 1000
[[federations]]
data = "digits"
rounds = 10
[scenarios.class]
[methods.retrain]
[methods.none]
[methods.fedup]
"""
CLEAN = {"alone": True, "runs": [{}] * 3}


@pytest.fixture
def cells(read):
    return {(cell.group.recipe.data, cell.method.name): cell for cell in read(TOML).cells()}


def result(cell, *, wall_s, seconds, clean=None, device="cuda"):
    timing = None if clean is None else {**CLEAN, "median": {"time": clean}}
    about = {"config": cell.config(), "device": device, "wall_s": wall_s, "timing": timing}
    return {**about, "metrics": {"time": seconds}, "cost": {"time_s": {"train": seconds}}}


def test_like_cells_count_in_the_time_that_they_take_alone_and_trainings_by_their_work(cells):
    retrain, none = cells["mnist", "retrain"], cells["mnist", "none"]
    stored = [result(retrain, wall_s=9.0, seconds=8.0, clean=2.0), result(none, wall_s=4.0, seconds=0.0)]
    slow = result(none, wall_s=4000.0, seconds=0.0, device="cpu")  # no time of a GPU
    known = Estimator([*stored, slow])
    assert known.sharing == 0.25
    assert (known.cell(none).seconds, known.cell(none).is_guess) == (1.0, False)
    assert known.training(retrain.group).seconds == pytest.approx(2.0)
    longer = replace(retrain.group, recipe=replace(retrain.group.recipe, rounds=30, rows=2000))
    assert known.training(longer).seconds == pytest.approx(12.0)
    alone = known.group([none])  # the federation and Retrain as its reference are trained first
    assert alone.seconds == pytest.approx(5.0) and known.group([retrain, none]).seconds == pytest.approx(5.0)
    shadow = replace(none, group=replace(none.group, shadow=True))
    assert known.group([shadow]).seconds > alone.seconds


def test_what_was_never_measured_is_a_guess_and_says_so(cells):
    known = Estimator([result(cells["mnist", "none"], wall_s=4.0, seconds=0.0)])
    assert known.cell(cells["digits", "none"]).is_guess and known.cell(cells["digits", "none"]).seconds == 4.0
    assert known.group([cells["mnist", "fedup"], cells["mnist", "none"]]).is_guess
    assert Estimator([]).group([cells["mnist", "fedup"]]).is_guess
