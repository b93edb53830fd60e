"""The last layer behind a closed form: what it must be, and that no input gets it to answer a dropped class."""

import copy

import pytest
import torch
from tests._digits import TrainedDigits
from torch import nn

import fedup
from fedup import Forget, Terms, collect, plug, unlearn
from fedup.errors import CutError, SettingError
from fedup.statistics.integer_moments import MomentConfig
from fedup.unlearning.closed_form_fit import fit_closed_form

FORCED = {"force": True, "terms": Terms(measure=False)}  # digits leave classes with few rows
ANY_ROWS = MomentConfig(least_rows=1, by_class="always")


@pytest.fixture(scope="module")
def digits():
    trained = TrainedDigits()
    trained.moments = collect(trained.model, trained.federation, statistics=ANY_ROWS)
    return trained


@pytest.fixture
def store(digits):
    return copy.deepcopy(digits.moments)


def test_no_input_is_answered_with_a_dropped_class(digits, store):
    plugged = plug(digits.model)
    unlearn(plugged, store, Forget.classes([3, 8]), **FORCED)
    features = nn.Parameter(torch.randn(64, 32))
    head, fitted = digits.model[-1], plugged.served.filter
    optimizer = torch.optim.Adam([features], lr=1.0)
    for _ in range(200):  # as strong as gradients make it
        scores = head(fitted(features))
        assert not {3, 8} & set(scores.argmax(1).tolist())
        lead = scores[:, [3, 8]].max(1).values - scores[:, [0, 1, 2, 4, 5, 6, 7, 9]].max(1).values
        (-lead.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    extreme = torch.randn(4096, 32) * torch.logspace(-6, 8, 4096)[:, None]
    assert not {3, 8} & set(head(fitted(extreme)).argmax(1).tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lets_no_dropped_class_through(digits, dtype):
    """A last layer with nearly dependent outputs makes features large, which half precision rounds by whole points."""
    model = copy.deepcopy(digits.model)
    weight = model[-1].weight.data
    left, values, right = torch.linalg.svd(weight - weight.mean(0), full_matrices=False)
    values[5:9] *= 1e-3
    weight.copy_((left * values) @ right)
    plugged, own = plug(model), collect(model, digits.federation, statistics=ANY_ROWS)
    unlearn(plugged, own, Forget.classes([0, 3]), **FORCED)
    expected = plugged(digits.x).argmax(1)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        answers = plugged(digits.x).argmax(1)
        strange = plugged(digits.x * torch.logspace(-4, 6, len(digits.x)).view(-1, 1, 1, 1)).argmax(1)
    assert not {0, 3} & {*answers.tolist(), *strange.tolist()}
    assert float((answers == expected).double().mean()) > 0.9


def test_moments_need_a_last_layer_that_can_give_any_score(digits):
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.ReLU(), nn.Linear(4, 10))
    with pytest.raises(CutError, match="too many or nearly dependent"):
        collect(narrow, digits.federation, statistics="moments")
    with pytest.raises(SettingError, match="no guarantee"):
        collect(digits.model, digits.federation, statistics="moments", privacy=fedup.DP(1.0, clip="unit"))


def test_a_last_layer_that_rounds_too_much_or_overflows_is_refused(digits, store):
    half, small = copy.deepcopy(digits.model).bfloat16(), copy.deepcopy(digits.model).half()
    small[-1].weight.data *= 1e-3  # features for given scores get large
    for model in (half, small):
        with pytest.raises(CutError, match="a dropped class could win"):
            fit_closed_form(plug(model), store, Forget.classes([3]))


def test_inputs_that_are_no_numbers_are_not_answered_with_a_dropped_class(digits, store):
    plugged = plug(digits.model)
    unlearn(plugged, store, Forget.classes([0]), **FORCED)
    odd = torch.stack([torch.full((1, 28, 28), value) for value in (float("nan"), float("inf"), -1e38, 1e38)])
    assert 0 not in plugged(odd.to(digits.x)).argmax(1)


def test_moments_need_scores_that_are_the_linear_layers_own(digits):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = digits.model[:-1], copy.deepcopy(digits.model[-1])

        def tail(self, features, cut):
            return -self.head(features)

        def forward(self, x):
            return -self.head(self.body(x))

    class Odd(nn.Linear):
        def forward(self, features):
            return -super().forward(features)

    wide, odd = (nn.Sequential(*digits.model[:-1], layer) for layer in (nn.Linear(32, 12), Odd(32, 10)))
    for model, why in ((Turned(), "more than its linear"), (odd, "more than its linear"), (wide, "12 outputs for 10")):
        with pytest.raises(CutError, match=why):
            collect(model, digits.federation, statistics="moments", cut="head" if isinstance(model, Turned) else None)


def test_looking_at_the_last_layer_writes_nothing_to_a_model_in_training(digits):
    model = nn.Sequential(*copy.deepcopy(digits.model), nn.BatchNorm1d(10)).train()
    before = fedup.fingerprint(model)
    collect(model, digits.federation)
    assert fedup.fingerprint(model) == before and model.training


def test_where_several_vectors_of_a_row_enter_the_last_layer_centroids_are_collected(digits):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(28, 16), nn.Linear(16, 10)

        def tail(self, features, cut):
            scores = self.head(features)
            return scores.mean(1) if scores.ndim == 3 else scores

        def forward(self, x):
            return self.tail(self.body(x.flatten(0, 1)).relu(), "head")

    model = Tokens()
    with pytest.raises(CutError, match="16 inputs, and a row has 448 features"):
        collect(model, digits.federation, statistics="moments")
    store, plugged = collect(model, digits.federation), plug(model)
    unlearn(plugged, store, Forget.classes([3]), **FORCED)
    assert 3 not in plugged(digits.test_x).argmax(1)
