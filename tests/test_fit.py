"""The one-shot fit: what it minimises, what it records, what it depends on."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fedup import FilterConfig, Trace
from fedup.errors import DataError, SettingError
from fedup.filters.bottleneck import Bottleneck
from fedup.filters.fit import _OPTIMIZERS, Examples, fit_filter

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, CLASSES = 12, 3
CONFIG = FilterConfig(rank=6, steps=120, batch_size=16, lr=1e-2)


def _tail():
    torch.manual_seed(1)
    return nn.Linear(WIDTH, CLASSES)


def _examples(guarded=()):
    """Clusters that the tail tells apart, in every second row of the store."""
    torch.manual_seed(2)
    tail, labels = _tail(), torch.arange(60) % CLASSES
    vectors = torch.full((120, WIDTH), torch.nan)
    vectors[::2] = 3 * tail.weight.detach()[labels] / tail.weight.norm(dim=1)[labels, None] + torch.randn(60, WIDTH) / 4
    return Examples(vectors, torch.arange(0, 120, 2), labels, nonnegative=False, guarded=guarded)


def _losses(fitted, examples, tail):
    centroids = examples.vectors[examples.rows]
    with torch.no_grad():
        return cross_entropy(tail(fitted(centroids)), examples.labels), mse_loss(fitted(centroids), centroids)


def _bits(fitted):
    return torch.cat([fitted.encoder.flatten(), fitted.decoder.flatten()])


def test_both_losses_fall():
    tail, examples = _tail(), _examples()
    early = _losses(fit_filter(tail, examples, replace(CONFIG, steps=1)), examples, tail)
    late = _losses(fit_filter(tail, examples, CONFIG), examples, tail)
    assert late[0] < early[0] / 2 and late[1] < early[1] / 2


def test_the_tail_gets_no_gradient_and_the_filter_needs_none_afterwards():
    tail = _tail()
    tail.weight.grad = torch.ones_like(tail.weight)
    fitted = fit_filter(tail, _examples([1]), CONFIG)
    assert torch.equal(tail.weight.grad, torch.ones_like(tail.weight)) and tail.bias.grad is None
    assert not fitted.training and not any(weight.requires_grad for weight in fitted.parameters())


@pytest.mark.parametrize(("epochs", "size", "steps"), [(3, 16, 9), (2, 60, 2), (2, 100, 2), (5, 7, 40)])
def test_epochs_are_so_many_passes_over_all_centroids(epochs, size, steps):
    trace = Trace(every=1)
    fit_filter(_tail(), _examples(), replace(CONFIG, epochs=epochs, batch_size=size), trace=trace)
    assert len(trace.steps) == steps


def test_in_each_epoch_each_centroid_is_drawn_once():
    """Of a filter that does not move, the mean loss of an epoch's batches is that of all centroids."""
    trace, examples = Trace(every=1), _examples()
    config = replace(CONFIG, epochs=4, batch_size=15, lr=1e-20, optimizer="sgd")
    expected = float(_losses(fit_filter(_tail(), examples, config, trace=trace), examples, _tail())[1])
    losses = torch.tensor([step["reconstruction"] for step in trace.steps]).view(4, 4)
    torch.testing.assert_close(losses.mean(1), torch.full([4], expected))
    assert losses.std(1).min() > 0.01, "premise: batches differ"


def test_a_trace_records_every_so_many_steps_and_changes_no_bit():
    trace = Trace(every=4, measure=lambda fitted: {"norm": float(fitted.encoder.norm())})
    config, always = replace(CONFIG, alpha=0.3, steps=12), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitted = fit_filter(_tail(), _examples([1]), config, trace=trace)
    finally:
        torch.set_warn_always(always)
    assert torch.equal(_bits(fitted), _bits(fit_filter(_tail(), _examples([1]), config)))
    assert [step["step"] for step in trace.steps] == [4, 8, 12]
    assert trace.steps[-1]["norm"] == float(fitted.encoder.norm()) != trace.steps[0]["norm"]
    for step in trace.steps:
        assert step["total"] == pytest.approx(0.3 * step["cross_entropy"] + 0.7 * step["reconstruction"], rel=1e-5)
    with pytest.raises(SettingError):
        Trace(every=0)


@pytest.mark.parametrize("shares", [None, torch.rand(60)], ids=["once", "weighted"])
def test_same_seed_same_bits_whatever_ran_before_and_whatever_rows_are_out_of_use(shares):
    examples = replace(_examples([1]), shares=shares)
    torch.manual_seed(5)
    state, expected = torch.get_rng_state(), _bits(fit_filter(_tail(), examples, CONFIG))
    torch.set_rng_state(state)
    tail = _tail()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(_bits(fit_filter(tail, examples, CONFIG)), expected)
    assert torch.equal(torch.get_rng_state(), state)  # the global one is left alone
    examples.vectors[1::2] = 7.0
    assert torch.equal(_bits(fit_filter(_tail(), examples, CONFIG)), expected)
    assert not torch.equal(_bits(fit_filter(_tail(), examples, replace(CONFIG, seed=1))), expected)


def test_what_cannot_be_fitted_to_is_refused():
    examples, empty = _examples(), torch.arange(0)
    with pytest.raises(DataError, match="No centroid"):
        fit_filter(_tail(), replace(examples, rows=empty, labels=empty), CONFIG)
    with pytest.raises(DataError, match="diverged"):
        fit_filter(_tail(), examples, replace(CONFIG, lr=1e20))
    for value in (torch.nan, torch.inf):
        examples.vectors[4, 3] = value
        with pytest.raises(DataError, match="collect them again"):
            fit_filter(_tail(), examples, CONFIG)


@pytest.mark.parametrize(("name", "reference"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
def test_the_optimizer_is_that_of_torch_and_the_one_that_was_chosen(name, reference):
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    own, other = _OPTIMIZERS[name]([mine], lr=0.03), reference([theirs], lr=0.03)
    for _ in range(20):
        gradient = torch.randn(9) * 10 ** torch.randn(9)
        own.step([gradient])
        theirs.grad = gradient.clone()
        other.step()
    torch.testing.assert_close(mine, theirs)
    adam, sgd = (fit_filter(_tail(), _examples(), replace(CONFIG, optimizer=name)) for name in ("adam", "sgd"))
    assert not torch.equal(_bits(adam), _bits(sgd))


RANGES = {
    "alpha": lambda value: 0 <= value <= 1,
    "rank": lambda value: value >= 1,
    "steps": lambda value: value >= 1,
    "batch_size": lambda value: value >= 1,
    "epochs": lambda value: value >= 1,
    "lr": lambda value: 0 < value < float("inf"),
    "max_variance_loss": lambda value: 0 < value <= 1,
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RANGES)), st.integers(-2, 3) | st.floats())
@example("epochs", 0)
@example("epochs", 1.5)
def test_numbers_are_in_their_range_or_refused_by_name(name, value):
    whole = name in ("rank", "steps", "batch_size", "epochs")
    if RANGES[name](value) and (isinstance(value, int) or not whole):
        assert getattr(FilterConfig(**{name: value}), name) == value
    else:
        with pytest.raises(SettingError, match=name):
            FilterConfig(**{name: value})


@pytest.mark.parametrize("name", ["class_policy", "filter", "optimizer", "eraser_cut"])
def test_names_are_known_or_refused(name):
    for value in ("", None, 2, *(() if name == "eraser_cut" else ("other",))):
        with pytest.raises(SettingError, match=name):
            FilterConfig(**{name: value})


def test_a_filter_is_linear_relu_linear_without_bias_and_ends_in_a_relu_where_features_do():
    signed, rectified = Bottleneck(60, 3, nonnegative=False), Bottleneck(60, 3, nonnegative=True)
    rectified.load_state_dict(signed.state_dict())
    maps = torch.randn(5, 3, 4, 5, dtype=torch.float64)
    flat = maps.flatten(1).float()
    with torch.no_grad():
        expected = (flat @ signed.encoder.T).clamp(min=0) @ signed.decoder.T
        torch.testing.assert_close(signed(flat), expected)
        torch.testing.assert_close(rectified(flat), expected.relu())
        assert rectified(maps).shape == maps.shape and rectified(maps).dtype == torch.float64
    assert float(expected.min()) < 0
    assert [Bottleneck(width, 32, nonnegative=True).size_bytes for width in (512, 128)] == [
        131072,
        32768,
    ]  # the paper's
