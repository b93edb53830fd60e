"""Projections: orthonormal, of the frozen model or of nothing, and without loss where they say so."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup.errors import CutError
from fedup.privacy.projection import basis_of

few = settings(max_examples=30, deadline=None, derandomize=True)
HOWS = ["auto", "tail", "random", "none"]


def _head(width, outputs, seed=0):
    """A model that is a linear layer, after one that is not at the cut."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, outputs)).eval()


def _convolutions():
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 4)).eval()


def _basis(model, width, how, dims=128, num_classes=4, cut="2"):
    return basis_of(model, cut, width, how=how, dims=dims, num_classes=num_classes)


def _rows(width, count=50):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def _differences(logits):
    return logits - logits.mean(1, keepdim=True)


@few
@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 50), st.sampled_from(HOWS), st.integers(0, 99))
def test_columns_are_orthonormal(width, num_classes, dims, how, seed):
    basis = _basis(_head(width, num_classes, seed), width, how, dims, num_classes)
    assert basis.shape[0] == width
    assert 1 <= basis.shape[1] <= width
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-5, rtol=0)


@few
@given(st.integers(2, 40), st.integers(2, 12), st.sampled_from(["auto", "tail"]), st.integers(0, 99))
def test_the_tails_basis_keeps_all_differences_of_logits(width, num_classes, how, seed):
    model, rows = _head(width, num_classes, seed), _rows(width)
    basis = _basis(model, width, how, num_classes=num_classes)
    assert basis.shape[1] == min(num_classes - 1, width)
    with torch.no_grad():
        kept, logits = model[2](rows @ basis @ basis.T), model[2](rows)
    torch.testing.assert_close(_differences(kept), _differences(logits), atol=1e-4, rtol=1e-4)


def test_a_linear_layer_that_is_not_the_classifier_keeps_all_that_it_says():
    model, rows = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 7), nn.Tanh(), nn.Linear(7, 4)), _rows(20)
    basis = _basis(model, 20, "auto")
    assert basis.shape == (20, 7)
    torch.testing.assert_close(model[2](rows @ basis @ basis.T), model[2](rows), atol=1e-4, rtol=1e-4)


def test_outputs_that_repeat_others_take_no_direction():
    model = _head(20, 4)
    with torch.no_grad():
        model[2].weight[3] = model[2].weight[0]
        model[2].weight[2] = model[2].weight[1]
    assert _basis(model, 20, "tail").shape == (20, 1)


@pytest.mark.parametrize("dims", [128, 24])
def test_features_that_are_few_stay_as_they_are(dims):
    assert torch.equal(_basis(_convolutions(), 24, "auto", dims), torch.eye(24))
    assert torch.equal(_basis(_head(24, 4), 24, "none", 3), torch.eye(24))


def test_a_tail_that_reads_more_than_allowed_is_passed_over():
    model = _head(24, 10)
    assert _basis(model, 24, "auto", dims=9, num_classes=10).shape == (24, 9)
    assert _basis(model, 24, "auto", dims=8, num_classes=10).shape == (24, 8)
    assert torch.equal(_basis(model, 24, "auto", 8, 10), _basis(model, 24, "random", 8, 10))
    assert _basis(model, 24, "tail", dims=8, num_classes=10).shape == (24, 9)  # asked for, whatever it takes


def test_random_directions_are_the_same_for_everybody():
    first = _basis(_head(24, 4, seed=0), 24, "random", 8)
    torch.manual_seed(3)
    assert torch.equal(_basis(_head(24, 4, seed=1), 24, "random", 8), first)
    assert not torch.equal(_basis(_head(25, 4), 25, "random", 8)[:24], first)


@pytest.mark.parametrize("how", HOWS)
def test_the_model_and_where_it_came_from_alone_decide(how):
    """No data goes in: copies of the weights give the same bits, and the model is left as it was."""
    model = _head(24, 4)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    assert torch.equal(_basis(model, 24, how), _basis(twin, 24, how))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not _basis(model, 24, how).requires_grad


def test_a_layer_that_says_the_same_of_every_input_is_refused():
    model = _head(24, 4)
    nn.init.zeros_(model[2].weight)
    with pytest.raises(CutError, match="same of every input"):
        _basis(model, 24, "auto")


def test_a_hidden_layer_as_wide_as_there_are_classes_keeps_all_that_it_says():
    model, rows = nn.Sequential(nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 4)), _rows(20)
    basis = _basis(model, 20, "auto", cut="0")
    torch.testing.assert_close(model[0](rows @ basis @ basis.T), model[0](rows), atol=1e-4, rtol=1e-4)


def test_a_layer_that_acts_on_each_position_gets_a_basis_of_a_rows_width():
    assert _basis(_head(5, 4), 3 * 5, "auto").shape[0] == 15
