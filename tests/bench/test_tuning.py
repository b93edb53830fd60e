"""Equal terms: declared grids, equal trials, judged on rows that no table shows."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench._progress import silent

from fedup.bench.case import EvaluationData, Outputs
from fedup.bench.experiment import load_experiment
from fedup.bench.methods import method_class
from fedup.bench.tuned import BUDGET
from fedup.bench.tuning import TUNING_SEED, accuracies, combinations, grid_of, score, tunable, tune_places
from fedup.errors import SettingError
from fedup.registry import names

shares = st.floats(0, 1)
TOML = """
tuned = "chosen"
[[federations]]
data = "digits"
rows = 150
clients = 3
rounds = 2
[scenarios.class]
[scenarios.client]
[scenarios.sample]
[methods.finetune]
[methods.federaser]
[methods.none]
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    place = tmp_path_factory.mktemp("tuning")
    (place / "equal.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDUP_CACHE", str(place / "cache"))
        yield load_experiment(place / "equal.toml")


def tuned(method, experiment, **choice):
    return [one for _, one in tune_places([method], experiment, device="cpu", progress=silent, **choice)]


def test_a_grid_is_within_the_budget_and_made_of_settings_that_the_method_takes(tmp_path):
    tuned_ = [name for name in names("fedup.bench.methods") if grid_of(name)]
    assert {"fedup", "federaser", "eraseclient", "exact_fun", "fused", "fused_retained", "finetune"} <= set(tuned_)
    for name in tuned_:
        method, grid = method_class(name), grid_of(name)
        assert 2 <= len(combinations(name)) <= BUDGET
        assert set(grid) <= {one.name for one in fields(method)}
        assert [tuple(one.values()) for one in combinations(name)] == list(itertools.product(*grid.values()))
        assert all(method(**settings) for settings in combinations(name))
    own = tmp_path / "greedy.py"
    own.write_text("from fedup.bench.methods.finetune import Method\nGRID = {'rounds': (1, 2, 3, 4, 5)}\n")
    for name, told in (("none", "no GRID"), ("retrain", "no GRID"), (str(own), "5 combinations")):
        with pytest.raises(SettingError, match=told):
            combinations(name)


@settings(max_examples=40, deadline=None)
@given(shares, shares, shares, shares)
def test_a_score_rises_with_what_is_retained_and_with_closeness_to_retrain_on_what_is_forgotten(
    r_a, f_a, goal_r_a, goal_f_a
):
    goal = goal_r_a, goal_f_a
    found = score((r_a, f_a), goal)
    assert 0 <= found <= 2
    assert score(goal, goal) == 1
    rounding = 1e-12
    assert found <= score((max(r_a, goal_r_a), f_a), goal) + rounding
    assert found <= score((r_a, goal_f_a), goal) + rounding


def test_each_place_that_a_method_can_answer_for_gets_its_best_trial_each_time(experiment):
    done = [("digits-lenet5", "client", "finetune")]
    found = tuned("finetune", experiment, leave_out=done)
    assert [one.scenario for one in found] == ["class", "sample"]
    for one in found:
        assert [trial.settings for trial in one.tried] == combinations("finetune")
        best = max(trial.score for trial in one.tried)
        assert one.settings == next(trial.settings for trial in one.tried if trial.score == best)  # the first of equals
        assert one.about["seed"] == TUNING_SEED and TUNING_SEED not in experiment.seeds
    (again,) = tuned("finetune", experiment, only=["class"])
    assert again.settings == found[0].settings
    assert [replace(trial, time_s=0) for trial in again.tried] == [replace(trial, time_s=0) for trial in found[0].tried]
    with pytest.raises(SettingError, match="has no method fused"):
        tuned("fused", experiment)


def test_held_out_and_test_rows_are_never_looked_at(world_of_rows):
    outputs, hide = world_of_rows
    before = accuracies(outputs())
    hide("heldout")
    assert accuracies(outputs()) == before


@pytest.fixture(params=["class", "client", "sample"])
def world_of_rows(request, experiment):
    """Outputs of a model that cannot take NaN, over a federation whose held-out and test rows can be made so."""
    from fedup.bench.shared_setup import SharedSetup

    (cell, *_) = experiment.cells([0], [request.param])
    setup = SharedSetup(replace(cell.group, recorded=False), "cpu", silent)
    situation, dataset = setup.situation, setup.dataset
    federation = replace(situation.federation, x=situation.federation.x.clone())
    data = EvaluationData(
        replace(situation, federation=federation), replace(dataset, test_x=dataset.test_x * torch.nan)
    )

    def hide(part):
        federation.x[federation.rows(part)] = torch.nan

    return lambda: Outputs(setup.task.model, data), hide


def test_all_that_declare_a_grid_are_tuned_place_by_place(experiment):
    assert tunable(experiment) == ["finetune", "federaser"]
    found = tune_places(tunable(experiment), experiment, only=["class", "client"], device="cpu", progress=silent)
    assert [(use, one.scenario) for use, one in found] == [
        ("finetune", "class"),
        ("finetune", "client"),
        ("federaser", "client"),
    ]
