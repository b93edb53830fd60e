"""Means, deviations, marks and the paper's figures, from result files whose content is known."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench._made_up import MadeUp

from fedup.bench.summary import Figure, _paper, summarize

GOOD = {"r_a": 0.9, "f_a": 0.0}


@pytest.fixture
def made_up(tmp_path) -> MadeUp:
    return MadeUp(tmp_path)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.integers(0, 9), st.floats(-1e6, 1e6), min_size=1))
def test_a_figure_is_the_mean_and_the_sample_deviation_over_its_seeds(values):
    figure = Figure(values)
    assert figure.mean == statistics.fmean(values.values())
    assert figure.n == len(values)
    assert figure.std == (statistics.stdev(values.values()) if len(values) > 1 else None)


def test_seeds_without_a_value_do_not_count_and_a_failure_is_told(made_up):
    assert summarize(made_up.experiment, made_up.results) == []
    failed = {"failed": {"error": "RuntimeError", "message": "no memory", "where": ""}}
    made_up.put("class", "fedup", {0: GOOD, 1: {"r_a": 0.8, "f_a": None}, 2: failed})
    (block,) = summarize(made_up.experiment, made_up.results)
    (row,) = block.rows
    assert (row.seeds, row.failures) == ([0, 1], {2: "RuntimeError: no memory"})
    assert row.figure("r_a").mean == pytest.approx(0.85)
    assert row.figure("f_a").values == {0: 0.0}
    assert row.figure("asr") is None


def test_results_of_other_settings_are_left_alone(made_up, tmp_path):
    made_up.put("class", "fedup", {0: GOOD})
    other = MadeUp(tmp_path, "[[federations]]\ndata = 'mnist'\nrounds = 3\n[scenarios.class]\n[methods.fedup]\n")
    assert summarize(other.experiment, made_up.results) == []


def test_an_attack_that_cost_less_than_half_a_point_did_not_take_and_a_class_request_is_none(made_up):
    made_up.put("client", "retrain", {seed: {"r_a": 0.9, "asr": None} for seed in range(3)})
    costs = {0: 0.8949, 1: 0.8951, 2: 0.5}
    made_up.put("client", "none", {seed: {"r_a": r_a, "asr": None} for seed, r_a in costs.items()})
    for method in ("retrain", "none"):
        made_up.put("class", method, {0: GOOD})
    blocks = {block.scenario.name: block for block in summarize(made_up.experiment, made_up.results)}
    assert (blocks["client"].failed_attacks, blocks["class"].failed_attacks) == ([1], [])


def test_the_papers_figure_stands_beside_ours_where_it_printed_one(made_up):
    for scenario in ("class", "client"):
        for method in ("retrain", "fedup", "none"):
            made_up.put(scenario, method, {0: GOOD})
    blocks = {block.scenario.name: block for block in summarize(made_up.experiment, made_up.results)}
    assert blocks["class"].row("fedup").paper == {"r_a": 1.0, "f_a": 0.0, "mia_learned": 0.99}
    assert blocks["client"].row("retrain").paper == {"r_a": 0.99, "f_a": 0.0, "mia_learned": 0.67}
    assert blocks["client"].row("none").paper == {}


@pytest.mark.parametrize("pair", ["mnist-lenet5", "cifar10-resnet18", "cifar10-vit", "ag_news-tinybert"])
def test_the_papers_main_table_is_there_with_its_row_of_membership_inference(pair):
    methods = ["eraseclient", "federaser", "exact_fun", "fused", "retrain", "fedup"]
    for scenario, named in (("client", methods), ("class", methods[3:]), ("sample", methods[3:])):
        figures = _paper()[pair][scenario]
        assert all(0 < figures[method]["mia_learned"] < 1 for method in named)
