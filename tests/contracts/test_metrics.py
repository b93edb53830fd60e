"""What every metric keeps to: each of its columns has a plain figure, the same at any time, and it changes nothing."""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedup import fingerprint
from fedup.bench.case import Case
from fedup.bench.metrics import columns, metric
from fedup.registry import names
from fedup.tasks.evaluation import predict

METRICS = names("fedup.bench.metrics")
METHODS = ["none", "retrain", "fedup", "logit_mask"]  # reversible or not, with a path or not, −∞ in logits
CLOCKED = {"overhead"}  # measured anew at each call
RANGES = {
    "share": (0, 1 + 1e-9),
    "points": (-1, 1),
    "seconds": (0, math.inf),
    "bytes": (0, math.inf),
    "count": (0, math.inf),
    "ratio": (-1e-6, math.inf),  # KL of probabilities that are cut off below
    "number": (-math.inf, math.inf),
    "yes": (0, 1),
}


@dataclass(frozen=True)
class Measured:
    """A metric's figures, those when all was measured again, and what it might have changed."""

    first: dict[str, Any]
    again: dict[str, Any]
    before: tuple[object, ...]
    after: tuple[object, ...]


def state(case: Case) -> tuple[object, ...]:
    models = case.now.model, case.original.model, case.retrained.model
    weights = [fingerprint(model) for model in models]
    modes = [module.training for model in models for module in model.modules()]
    x = case.data.dataset.test_x[:8]
    return (
        weights,
        modes,
        predict(case.now.model, x).tolist(),
        torch.random.get_rng_state().tolist(),
        case.unlearned.cost.to_json(),
    )


@pytest.fixture(scope="module")
def measured(world) -> dict[str, dict[str, Measured]]:
    """By method and situation, then by metric."""
    found: dict[str, dict[str, Measured]] = {}
    for method in METHODS:
        for place, unlearned in world.answers(method):
            own = found[f"{method} in {place.name}"] = {}
            first, again = place.case(unlearned), place.case(unlearned)
            torch.manual_seed(1)
            before = *state(first), place.state()
            for name in METRICS:
                figures = metric(name).measure(first), metric(name).measure(again)
                after = *state(first), place.state()
                own[name] = Measured(*figures, before, after)
                before = after
    return found


@pytest.mark.parametrize("name", METRICS)
def test_columns_say_what_a_table_needs(name):
    assert len(metric(name).COLUMNS) > 0
    for column in metric(name).COLUMNS:
        assert column.key.isidentifier() and column.title
        assert column.about.endswith(".")
        assert column.style in RANGES
        assert column.table in ("accuracy", "closeness", "cost")
        assert column.better in ("higher", "lower", "retrain", "neither")


def test_no_two_metrics_share_a_key_a_title_or_a_place_in_a_table(measured):
    shown = columns()
    assert len(shown) == sum(len(metric(name).COLUMNS) for name in METRICS)
    for unique in (lambda c: c.key, lambda c: c.title, lambda c: (c.table, c.order)):
        assert len(set(map(unique, shown))) == len(shown)
    for what, by_metric in measured.items():
        keys = [key for one in by_metric.values() for key in one.first]
        assert len(keys) == len(set(keys)), what


@pytest.mark.parametrize("name", METRICS)
def test_every_column_has_a_figure_in_range_or_none_that_json_can_hold(name, measured):
    for what, by_metric in measured.items():
        figures = by_metric[name].first
        assert {column.key for column in metric(name).COLUMNS} <= set(figures), what
        assert json.loads(json.dumps(figures, allow_nan=False)) == figures, what
        for column in metric(name).COLUMNS:
            figure = figures[column.key]
            assert figure is None or type(figure) in (int, float), (what, column.key)
            low, high = RANGES[column.style]
            assert figure is None or low <= figure <= high, (what, column.key, figure)


@pytest.mark.parametrize("name", METRICS)
def test_figures_are_the_same_when_measured_again_and_measuring_changes_nothing(name, measured):
    for what, by_metric in measured.items():
        first, again = ({**one, **dict.fromkeys(CLOCKED)} for one in (by_metric[name].first, by_metric[name].again))
        assert first == again, what
        assert by_metric[name].after == by_metric[name].before, what


def all_of(by_metric: dict[str, Measured]) -> dict[str, Any]:
    return {key: figure for one in by_metric.values() for key, figure in one.first.items()}


def test_retrain_measured_against_itself_is_no_distance_away(world, measured):
    for place, _ in world.answers("retrain"):
        figures = all_of(measured[f"retrain in {place.name}"])
        assert (figures["tow"], figures["tv"], figures["kl"]) == (1, 0, 0), place.name
        assert {figures[key] for key in figures if key.startswith("gap_")} <= {0, None}, place.name
        assert figures["time_to_effect"] is not None, place.name


def test_figures_are_there_where_there_is_something_to_measure_and_nowhere_else(world, measured):
    for method in METHODS:
        for place, unlearned in world.answers(method):
            figures, where = all_of(measured[f"{method} in {place.name}"]), (method, place.name)
            there = place.data.situation.triggered is not None
            assert [figures[key] is not None for key in ("asr", "triggered", "zero_a")] == [there] * 3, where
            assert (figures["f_a"] is None) == (place.task.request.kind == "sample"), where
            assert figures["f_a_train"] is not None, where
            assert figures["restored"] == (1.0 if unlearned.reversible else None), where
            if method == "logit_mask":
                assert (figures["forget_loss"], figures["gap_forget_loss"]) == (None, None), where
            else:
                assert figures["forget_loss"] > 0, where
