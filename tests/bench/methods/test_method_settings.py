"""Settings of methods: each has a range, and what lies outside is refused by name."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.bench.methods import method_class
from fedup.errors import SettingError

ABOVE_0, SHARE, AT_LEAST_0, AT_LEAST_1 = "(0, inf)", "(0, 1]", "[0, inf)", "[1, inf)"
RANGES = {
    "eraseclient": {
        **{"lr": ABOVE_0, "clip": ABOVE_0, "momentum": "[0, 1)", "stop_accuracy": "[0, 1)"},
        **{"stop_distance": AT_LEAST_0, "post_rounds": AT_LEAST_0, "epochs": AT_LEAST_1},
    },
    "exact_fun": {"step": "(0, 1)"},
    "federaser": {"every": AT_LEAST_1, "ratio": SHARE, "post_rounds": AT_LEAST_0},
    "finetune": {"rounds": AT_LEAST_1},
    "fused": {"lr": SHARE, "rank": AT_LEAST_1, "rounds": AT_LEAST_1, "alpha": ABOVE_0},
    "fused_retained": {"layers": SHARE, "density": SHARE, "lr": SHARE, "rank": AT_LEAST_1, "rounds": AT_LEAST_1},
    "head_only": {"steps": AT_LEAST_1, "batch_size": AT_LEAST_1, "lr": ABOVE_0},
    "retrain_again": {"other_seed": AT_LEAST_1},
}
CASES = [(method, name, range_) for method, ranges in RANGES.items() for name, range_ in ranges.items()]
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 1e-9, -1e-9, 0.5, 1 - 1e-9, 1 + 1e-9, 3.0, math.nan]) | st.floats(-5, 5)


def lies_in(value: float, range_: str) -> bool:
    low, high = map(float, range_[1:-1].split(","))
    return (low <= value if range_[0] == "[" else low < value) and (
        value <= high if range_[-1] == "]" else value < high
    )


@pytest.mark.parametrize(("method", "name", "range_"), CASES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_setting_is_taken_in_its_range_and_refused_by_name_outside(method, name, range_, data):
    whole = isinstance(getattr(method_class(method)(), name), int)
    value = data.draw(st.integers(-3, 3) if whole else NUMBERS)
    if lies_in(value, range_):
        assert getattr(method_class(method)(**{name: value}), name) == value
    else:
        with pytest.raises(SettingError, match=name):
            method_class(method)(**{name: value})


def test_an_unknown_norm_is_refused():
    with pytest.raises(SettingError, match="norm"):
        method_class("federaser")(norm="both")
