"""The experiment of privacy: what its file says, and the method under a guarantee from end to end on digits."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from fedup.bench.experiment import load_experiment
from fedup.bench.methods.fedup import Method
from fedup.bench.metrics import columns
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.bench.settings import config_of
from fedup.errors import SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.privacy import DP, epsilon_of
from fedup.statistics.centroids import CentroidConfig

CHOSEN = {  # cells of the experiment below that are measured, to save time
    "class": ["retrain", "fedup", "dp4", "clipped", "paper-0.05", "asked-after"],
    "client": ["dp4", "paper-0.05"],
    "random_samples": ["fedup", "dp4", "asked-after"],
}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEW = {"epsilon", "delta", "clip", "cells", "paper_accounting"}
TINY = """
[[federations]]
data = "digits"
clients = 3
rounds = 2
batch_size = 32
[scenarios.class]
[scenarios.client]
[scenarios.random_samples]
[methods.fedup]
steps = 40
[methods.dp4]
use = "fedup"
steps = 40
epsilon = 4.0
[methods.clipped]
use = "fedup"
steps = 40
epsilon = 3.0
delta = 1e-6
clip = "6.0"
cells = 2
[methods."paper-0.05"]
use = "fedup"
steps = 40
sigma = 0.05
paper_accounting = true
[methods."asked-after"]
use = "fedup"
steps = 40
epsilon = 4.0
cache = false
"""


@pytest.fixture(scope="module")
def experiment():
    return load_experiment(BENCHMARKS / "experiments" / "privacy.toml")


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "mine.toml").write_text(text)
        return load_experiment(tmp_path / "mine.toml")

    return read


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Some of it, and some of that again from nothing: results by (scenario, method)."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.toml").write_text(TINY)
    cells = [
        cell
        for cell in load_experiment(folder / "tiny.toml").cells()
        if cell.method.name in CHOSEN[cell.group.scenario.name]
    ]
    found = []
    for place, wanted in (("one", cells), ("two", [cells[2], cells[3]])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDUP_CACHE", str(folder / place / "cache"))
            events = list(run_cells(wanted, Results(folder / place / "results"), progress=lambda *told: None))
        assert {event.outcome for event in events} == {"done"}, [event.result.get("failed") for event in events]
        found.append({(event.cell.group.scenario.name, event.cell.method.name): event.result for event in events})
    return found


def figures_of(measured, scenario):
    """Figures by method."""
    return {method: found["metrics"] for (place, method), found in measured[0].items() if place == scenario}


# --- the file


def test_it_has_every_guarantee_beside_the_papers_noise_and_none(experiment):
    settings = {method.name: method.settings for method in experiment.methods if method.use == "fedup"}
    assert {name: (one.epsilon, one.sigma, one.paper_accounting) for name, one in settings.items()} == {
        "fedup": (0.0, 0.0, False),
        "dp8": (8.0, 0.0, False),
        "dp4": (4.0, 0.0, False),
        "dp2": (2.0, 0.0, False),
        "dp1": (1.0, 0.0, False),
        "dp05": (0.5, 0.0, False),
        "paper-0.001": (0.0, 0.001, True),
        "paper-0.005": (0.0, 0.005, True),
        "paper-0.01": (0.0, 0.01, True),
        "paper-0.05": (0.0, 0.05, True),
        "paper-0.1": (0.0, 0.1, True),
    }
    assert {one.delta for one in settings.values()} == {1e-5}
    assert experiment.methods[0].name == "retrain"


def test_its_federations_meet_their_scenarios(experiment):
    assert {name: [one.name for one in own] for name, own in experiment.scenarios.items()} == {
        "mnist-lenet5": ["client", "class"],
        "cifar10-resnet18": ["client", "class"],
        "ag_news-tinybert": ["client", "class"],
        "cifar100-resnet34": ["class"],
    }
    assert len({cell.hash for cell in experiment.cells()}) == len(experiment.cells())
    assert experiment.seeds == (0, 1, 2)


def test_its_goals_are_about_methods_and_figures_that_there_are_and_can_be_missed(experiment):
    methods = {method.name for method in experiment.methods}
    figures = {column.key for column in columns()}
    assert experiment.goals
    for goal in experiment.goals:
        assert goal.scenario in [one.name for one in experiment.scenarios[goal.federation]]
        assert goal.method in methods
        assert goal.metric in figures
        assert goal.other is not None  # a figure of this very experiment, not a bound that nothing comes near
        assert goal.other[0] in methods and goal.other[1] in figures
    at_one = {
        (goal.federation, goal.scenario): goal.margin
        for goal in experiment.goals
        if (goal.method, goal.metric) == ("dp1", "r_a") and goal.at_least and goal.other == ("fedup", "r_a")
    }
    assert len(at_one) == 6
    assert all(-0.025 <= margin < 0 for margin in at_one.values())


# --- what was measured before stays valid


def test_the_method_has_every_setting_of_what_it_is_made_of():
    named = {field.name for cls in (FilterConfig, CentroidConfig, DP) for field in fields(cls)}
    assert named - {"seed", "replay_seed"} <= {field.name for field in fields(Method)}


def test_configurations_without_the_new_settings_do_not_tell_them():
    assert NEW.issubset(field.name for field in fields(Method))
    assert NEW.isdisjoint(config_of(Method()))
    assert NEW.isdisjoint(config_of(Method(sigma=0.01, preset="paper")))
    assert config_of(Method(epsilon=0.0, delta=1e-5, clip="unit", cells=1)) == config_of(Method())


@pytest.mark.parametrize(
    "new", [{"epsilon": 2.0}, {"delta": 1e-6}, {"clip": "3"}, {"cells": 2}, {"sigma": 0.1, "paper_accounting": True}]
)
def test_each_new_setting_is_told_where_it_is_another(new):
    told = config_of(Method(**new))
    assert NEW & set(told) == NEW & set(new)
    assert new.items() <= told.items()


def test_results_that_are_stored_are_those_of_todays_configurations():
    """Their names have the hash of a configuration, and the runner would measure them again if it changed."""
    known = 0
    for name in ("defaults", "main", "sample", "sample_kinds"):
        results = Results(BENCHMARKS / "results" / name)
        cells = load_experiment(BENCHMARKS / "experiments" / f"{name}.toml").cells()
        stored = {path for path in results.folder.glob("*/*/*.json") if path.name.startswith("fedup-")}
        found = {results.path(cell) for cell in cells if cell.method.name == "fedup"} & stored
        for path in found:
            assert NEW.isdisjoint(json.loads(path.read_text())["config"]["method"])
        known += len(found)
    assert known > 20


# --- settings that cannot be


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("epsilon = -1.0", "epsilon must be above 0"),
        ("epsilon = nan", "epsilon must be above 0"),
        ("epsilon = inf", "epsilon must be above 0"),
        ('epsilon = "1"', "must be a number"),
        ("epsilon = 1.0\ndelta = 0.0", "delta must lie strictly"),
        ("epsilon = 1.0\ndelta = 1e-3", "delta 0.001 is above 1e-05"),
        ('epsilon = 1.0\nclip = "units"', "could not convert"),
        ('epsilon = 1.0\nclip = "-1"', "clip must be"),
        ("epsilon = 1.0\ncells = 0", "cells must be"),
        pytest.param(
            "paper_accounting = true",
            "without noise",
        ),
        pytest.param(
            "epsilon = 1.0\nsigma = 0.1",
            "sigma",
        ),
        pytest.param(
            "epsilon = 1.0\npaper_accounting = true",
            "paper_accounting",
        ),
    ],
)
def test_a_guarantee_that_cannot_be_is_refused_with_file_and_key(read, line, told):
    with pytest.raises(SettingError, match=r"mine\.toml: methods\.fedup") as refused:
        read(f'[[federations]]\ndata = "digits"\n[scenarios.class]\n[methods.fedup]\n{line}\n')
    assert told in str(refused.value)


# --- from end to end


def test_epsilon_is_what_was_asked_for(measured):
    figures = figures_of(measured, "class")
    assert figures["dp4"]["epsilon"] == pytest.approx(4, rel=1e-9)
    assert figures["asked-after"]["epsilon"] == pytest.approx(4, rel=1e-9)
    expected = epsilon_of(DP(3.0, 1e-6, 6.0).mu, 1e-5)  # the column is at δ = 1e-5
    assert figures["clipped"]["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert 2 < expected < 3
    for method in ("retrain", "fedup", "paper-0.05"):
        assert figures[method]["epsilon"] is None
    assert figures_of(measured, "client")["dp4"]["epsilon"] == pytest.approx(4, rel=1e-9)


def test_samples_that_are_sent_anew_cost_more_than_the_collection(measured):
    figures = figures_of(measured, "random_samples")
    once, twice, thrice = (epsilon_of(DP(4.0, clip="unit").mu * many**0.5, 1e-5) for many in (1, 2, 3))
    assert figures["dp4"]["epsilon"] in (pytest.approx(twice), pytest.approx(thrice))  # an eraser is one more
    assert figures["asked-after"]["epsilon"] in (pytest.approx(once), pytest.approx(twice))
    assert figures["fedup"]["epsilon"] is None


def test_the_papers_epsilon_is_there_where_it_is_counted_and_nowhere_else(measured):
    for (_, method), found in measured[0].items():
        assert (found["metrics"]["paper_epsilon"] is not None) == (method == "paper-0.05")
        if method == "paper-0.05":
            assert found["metrics"]["paper_epsilon"] > 0


def test_uploads_are_small_and_do_not_grow_with_the_rows(measured):
    for (place, method), found in measured[0].items():
        told = found["metrics"]["largest_upload"]
        assert (told is None) == (method == "retrain"), (place, method)
        if found["metrics"]["epsilon"] is not None:
            assert 0 < told < 1e6
            assert found["cost"]["bytes_up"] + found["cost"]["ahead_bytes_up"] >= told
    by_class = figures_of(measured, "class")
    assert by_class["dp4"]["largest_upload"] < by_class["fedup"]["largest_upload"]


def test_results_say_that_noise_that_can_be_replayed_protects_nothing(measured):
    for (_, method), found in measured[0].items():
        told = found["about"].get("privacy", {}).get("mechanism", "")
        assert told.startswith("TEST MODE") == (found["metrics"]["epsilon"] is not None), method


def test_a_forgotten_class_is_never_answered_under_any_of_them(measured):
    for method, figures in figures_of(measured, "class").items():
        assert figures["f_a"] <= 0.01, method


def test_the_original_model_comes_back_bit_for_bit(measured):
    for (_, method), found in measured[0].items():
        if method != "retrain":
            assert found["metrics"]["restored"] == 1.0


def test_membership_is_measured_where_there_are_rows_enough(measured):
    for (place, method), found in measured[0].items():
        figures = found["metrics"]
        assert (figures["mia_auc"] is None) == (figures["mia_tpr"] is None)
        assert figures["mia_auc"] is None or 0 <= figures["mia_auc"] <= 1
        if place == "random_samples":
            assert figures["mia_auc"] is None, method
    assert any(found["metrics"]["mia_auc"] is not None for found in measured[0].values())


def test_the_same_experiment_from_nothing_gives_the_same_figures(measured):
    whole, part = measured
    assert set(part) == {("class", "dp4"), ("class", "clipped")}
    clocked = ("time", "time_by_stage", "ahead_time", "overhead", "time_to_effect")
    for place, found in part.items():
        first, again = (
            {key: value for key, value in one["metrics"].items() if key not in clocked} for one in (whole[place], found)
        )
        assert first == again
        assert found["about"] == whole[place]["about"]
