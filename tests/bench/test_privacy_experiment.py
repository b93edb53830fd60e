"""The experiment of privacy: what its file says, and the method under a guarantee from end to end on digits."""

from dataclasses import fields
from pathlib import Path

import pytest
from tests.bench._progress import silent

from fedup.bench.experiment import load_experiment
from fedup.bench.methods.fedup import Method
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.bench.settings import config_of
from fedup.errors import SettingError
from fedup.filters.bottleneck import FilterConfig
from fedup.privacy import DP, epsilon_of
from fedup.statistics.centroids import CentroidConfig

CHOSEN = {  # cells of the experiment below that are measured, to save time
    "class": ["retrain", "fedup", "dp4", "clipped", "paper-0.05", "asked-after"],
    "random_samples": ["fedup", "dp4", "asked-after"],
}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEW = {"epsilon", "delta", "clip", "cells", "paper_accounting"}
TINY = """
[[federations]]
data = "digits"
clients = 3
rounds = 2
rows = 600
batch_size = 32
[scenarios.class]
[scenarios.random_samples]
[methods.fedup]
steps = 20
[methods.dp4]
use = "fedup"
steps = 20
epsilon = 4.0
[methods.clipped]
use = "fedup"
steps = 20
epsilon = 3.0
delta = 1e-6
clip = "6.0"
cells = 2
[methods."paper-0.05"]
use = "fedup"
steps = 20
sigma = 0.05
paper_accounting = true
[methods."asked-after"]
use = "fedup"
steps = 20
epsilon = 4.0
cache = false
"""


@pytest.fixture(scope="module")
def experiment():
    return load_experiment(BENCHMARKS / "experiments" / "privacy.toml")


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
            events = list(run_cells(wanted, Results(folder / place / "results"), progress=silent))
        assert {event.outcome for event in events} == {"done"}, [event.result.get("failed") for event in events]
        found.append({(event.cell.group.scenario.name, event.cell.method.name): event.result for event in events})
    return found


def figures_of(measured, scenario):
    """Figures by method."""
    return {method: found["metrics"] for (place, method), found in measured[0].items() if place == scenario}


# --- the file


def test_it_has_every_guarantee_beside_the_papers_noise_and_none(experiment):
    settings = {method.name: method.settings for method in experiment.methods if method.use == "fedup"}
    found = {name: (one.epsilon, one.sigma, one.paper_accounting) for name, one in settings.items()}
    guarantees = {"dp8": 8.0, "dp4": 4.0, "dp2": 2.0, "dp1": 1.0, "dp05": 0.5}
    assert found == {
        "fedup": (0.0, 0.0, False),
        **{name: (epsilon, 0.0, False) for name, epsilon in guarantees.items()},
        **{f"paper-{sigma}": (0.0, sigma, True) for sigma in (0.001, 0.005, 0.01, 0.05, 0.1)},
    }
    assert {one.delta for one in settings.values()} == {1e-5}
    # goals are about figures of this very experiment, not bounds that nothing comes near
    assert experiment.goals and all(goal.other is not None for goal in experiment.goals)


# --- what was measured before stays valid


def test_the_method_has_every_setting_of_what_it_is_made_of():
    named = {field.name for cls in (FilterConfig, CentroidConfig, DP) for field in fields(cls)}
    assert named - {"seed", "replay_seed"} <= {field.name for field in fields(Method)}


def test_new_settings_are_told_only_where_they_are_others_than_before():
    assert NEW.issubset(field.name for field in fields(Method))
    for silent_ in (
        Method(),
        Method(sigma=0.01, preset="paper"),
        Method(epsilon=0.0, delta=1e-5, clip="unit", cells=1),
    ):
        assert NEW.isdisjoint(config_of(silent_))
    news = {"epsilon": 2.0}, {"delta": 1e-6}, {"clip": "3"}, {"cells": 2}, {"sigma": 0.1, "paper_accounting": True}
    for new in news:
        told = config_of(Method(**new))
        assert NEW & set(told) == NEW & set(new)
        assert new.items() <= told.items()


# --- settings that cannot be


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("epsilon = nan", "epsilon must be above 0"),
        ('epsilon = "1"', "must be a number"),
        ("epsilon = 1.0\ndelta = 1e-3", "delta 0.001 is above 1e-05"),
        ('epsilon = 1.0\nclip = "units"', "could not convert"),
        ('epsilon = 1.0\nclip = "-1"', "clip must be"),
        ("epsilon = 1.0\ncells = 0", "cells must be"),
        ("paper_accounting = true", "without noise"),
        ("epsilon = 1.0\nsigma = 0.1", "sigma"),
        ("epsilon = 1.0\npaper_accounting = true", "paper_accounting"),
    ],
)
def test_a_guarantee_that_cannot_be_is_refused_with_file_and_key(tmp_path, line, told):
    path = tmp_path / "mine.toml"
    path.write_text(f'[[federations]]\ndata = "digits"\n[scenarios.class]\n[methods.fedup]\n{line}\n')
    with pytest.raises(SettingError, match=r"mine\.toml: methods\.fedup") as refused:
        load_experiment(path)
    assert told in str(refused.value)


# --- from end to end


def test_epsilon_is_what_was_asked_for_and_samples_that_are_sent_anew_cost_more(measured):
    figures = figures_of(measured, "class")
    assert figures["dp4"]["epsilon"] == figures["asked-after"]["epsilon"] == pytest.approx(4, rel=1e-9)
    expected = epsilon_of(DP(3.0, 1e-6, 6.0).mu, 1e-5)  # the column is at δ = 1e-5
    assert figures["clipped"]["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert 2 < expected < 3
    assert figures["dp4"]["largest_upload"] < figures["fedup"]["largest_upload"]
    samples = figures_of(measured, "random_samples")
    once, twice, thrice = (epsilon_of(DP(4.0, clip="unit").mu * many**0.5, 1e-5) for many in (1, 2, 3))
    assert samples["dp4"]["epsilon"] in (pytest.approx(twice), pytest.approx(thrice))  # an eraser is one more
    assert samples["asked-after"]["epsilon"] in (pytest.approx(once), pytest.approx(twice))


def test_a_figure_is_there_exactly_where_something_was_counted(measured):
    for (place, method), found in measured[0].items():
        figures, told = found["metrics"], found["about"].get("privacy", {}).get("mechanism", "")
        private = method in ("dp4", "clipped", "asked-after")
        assert (figures["epsilon"] is not None) == told.startswith("TEST MODE") == private  # noise that can be replayed
        assert (figures["paper_epsilon"] or 0) > 0 if method == "paper-0.05" else figures["paper_epsilon"] is None
        assert (figures["largest_upload"] is None) == (method == "retrain"), (place, method)
        if private:
            assert 0 < figures["largest_upload"] <= found["cost"]["bytes_up"] + found["cost"]["ahead_bytes_up"]
        assert figures["restored"] == (None if method == "retrain" else 1.0)
        assert place != "class" or figures["f_a"] <= 0.01, method
        assert (figures["mia_auc"] is None) == (figures["mia_tpr"] is None)
        assert place == "class" or figures["mia_auc"] is None


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
