"""Choices and their evidence survive being written, and reach the cells they were made for."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.bench.experiment import load_experiment
from fedup.bench.tuned import BUDGET, Trial, Tuned, load_tuned, save_tuned
from fedup.errors import ArtifactError, SettingError

TOML = """
tuned = "chosen"
[[federations]]
data = "mnist"
[scenarios.class]
[scenarios.client]
[methods.finetune]
[methods.fused]
[methods.exact_fun]
[methods.before]
use = "exact_fun"
answer = false
[methods.short]
use = "finetune"
rounds = 1
"""
TRIALS = [
    Trial({"rounds": 2}, 0.9, 0.8, 0.1, 1.5),
    Trial({"rounds": 5}, 0.0, 0.0, 0.0, 0.5, failed='a "quoted" reason'),
]


def chosen(scenario: str = "class", **settings) -> Tuned:
    return Tuned("mnist-lenet5", scenario, settings or {"rounds": 2}, {"r_a": 0.9, "f_a": 0.0}, TRIALS, {"seed": 100})


@pytest.fixture
def place(tmp_path):
    (tmp_path / "equal.toml").write_text(TOML)
    return tmp_path


def settings_of(place, method: str, scenario: str = "class"):
    (cell,) = load_experiment(place / "equal.toml").cells([0], [method, scenario])
    return cell.method.settings


values = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.text(max_size=20), st.floats(-1e6, 1e6).map(lambda x: round(x, 6))
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), values, max_size=4))
def test_what_is_written_is_read_again_whatever_its_settings(tmp_path_factory, given_settings):
    path = tmp_path_factory.mktemp("tuned") / "any.toml"
    assert load_tuned(path) == []
    choices = [dataclasses.replace(chosen(), settings=given_settings), chosen("client", rounds=5)]
    save_tuned(path, "any", "equal", choices)
    assert load_tuned(path) == choices
    assert f"budget = {BUDGET}" in path.read_text()


def test_a_second_choice_replaces_the_first_of_its_place_and_no_other(tmp_path):
    path = tmp_path / "finetune.toml"
    save_tuned(path, "finetune", "equal", [chosen(), chosen("client")])
    save_tuned(path, "finetune", "equal", [chosen(rounds=5)])
    assert {one.scenario: one.settings["rounds"] for one in load_tuned(path)} == {"class": 5, "client": 2}


@pytest.mark.parametrize("text", ["[[places]]\nfederation = 1", "no toml", "[[places]]\ntried = [1]", "places = 3"])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ArtifactError, match="tune again"):
        load_tuned(tmp_path / "bad.toml")


def test_a_choice_holds_in_its_place_for_every_name_of_the_method_but_not_over_what_the_experiment_gives(place):
    before = load_experiment(place / "equal.toml").cells([0], ["finetune", "class"])[0].hash
    save_tuned(place / "chosen" / "finetune.toml", "finetune", "equal", [chosen(rounds=5)])
    save_tuned(place / "chosen" / "exact_fun.toml", "exact_fun", "equal", [chosen(step=0.003)])
    assert settings_of(place, "finetune").rounds == 5
    assert settings_of(place, "finetune", "client").rounds == 3  # the default
    assert settings_of(place, "short").rounds == 1
    for name, answers in (("before", False), ("exact_fun", True)):
        assert (settings_of(place, name).step, settings_of(place, name).answer) == (0.003, answers)
    assert load_experiment(place / "equal.toml").cells([0], ["finetune", "class"])[0].hash != before


@pytest.mark.parametrize("wrong", [{"laps": 3}, {"rounds": "many"}, {"rounds": 0}])
def test_a_choice_that_the_method_does_not_know_is_refused_with_its_file(place, wrong):
    save_tuned(place / "chosen" / "finetune.toml", "finetune", "equal", [chosen(**wrong)])
    with pytest.raises(SettingError, match="chosen"):
        load_experiment(place / "equal.toml")
