"""The one-shot fit: what it minimises, what it records, what it depends on."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fedup import FilterConfig, Trace
from fedup.errors import DataError, SettingError
from fedup.filters.fit import _SGD, Examples, _Adam, fit_filter

WIDTH, CLASSES = 12, 3
CONFIG = FilterConfig(rank=6, steps=120, batch_size=16, lr=1e-2)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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
    assert late[0] < early[0] / 2
    assert late[1] < early[1] / 2


def test_alpha_zero_only_rebuilds_and_alpha_one_only_classifies():
    tail, examples = _tail(), _examples()
    rebuilt, classified = (
        _losses(fit_filter(tail, examples, replace(CONFIG, alpha=alpha)), examples, tail) for alpha in (0.0, 1.0)
    )
    assert classified[0] < rebuilt[0]
    assert rebuilt[1] < classified[1] / 2
    relabelled = replace(examples, labels=examples.labels.roll(1))
    fits = [fit_filter(tail, each, replace(CONFIG, alpha=0.0)) for each in (examples, relabelled)]
    assert torch.equal(*map(_bits, fits))


def test_the_total_is_the_weighted_sum_of_the_parts():
    trace = Trace(every=1)
    fit_filter(_tail(), _examples(), replace(CONFIG, alpha=0.3, steps=5), trace=trace)
    for step in trace.steps:
        parts = 0.3 * step["cross_entropy"] + 0.7 * step["reconstruction"]
        assert step["total"] == pytest.approx(parts, rel=1e-5)


def test_a_trace_records_every_so_many_steps_and_what_is_measured():
    trace = Trace(every=4, measure=lambda fitted: {"norm": float(fitted.encoder.norm())})
    fitted = fit_filter(_tail(), _examples(), replace(CONFIG, steps=12), trace=trace)
    assert [step["step"] for step in trace.steps] == [4, 8, 12]
    assert trace.steps[-1]["norm"] == float(fitted.encoder.norm()) != trace.steps[0]["norm"]


def test_recording_a_trace_warns_of_nothing():
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit_filter(_tail(), _examples(), replace(CONFIG, steps=1), trace=Trace(every=1))
    finally:
        torch.set_warn_always(always)


def test_a_trace_changes_no_bit():
    traced = fit_filter(_tail(), _examples([1]), CONFIG, trace=Trace(every=1, measure=lambda fitted: {}))
    assert torch.equal(_bits(traced), _bits(fit_filter(_tail(), _examples([1]), CONFIG)))


def test_a_trace_every_zero_steps_is_refused():
    with pytest.raises(SettingError):
        Trace(every=0)


@pytest.mark.parametrize("shares", [None, torch.rand(60)], ids=["once", "weighted"])
def test_same_seed_same_bits_whatever_ran_before(shares):
    examples, config = replace(_examples([1]), shares=shares), CONFIG
    torch.manual_seed(5)
    first = fit_filter(_tail(), examples, config)
    torch.rand(100)
    second = fit_filter(_tail(), examples, config)
    assert torch.equal(_bits(first), _bits(second))
    assert not torch.equal(_bits(first), _bits(fit_filter(_tail(), examples, replace(config, seed=1))))


def test_the_global_random_state_is_left_alone():
    tail, examples = _tail(), _examples([1])
    before = torch.get_rng_state()
    fit_filter(tail, examples, CONFIG)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_out_of_use_change_no_bit():
    examples = _examples([1])
    before = _bits(fit_filter(_tail(), examples, CONFIG))
    examples.vectors[1::2] = 7.0
    assert torch.equal(_bits(fit_filter(_tail(), examples, CONFIG)), before)


def test_the_tail_gets_no_gradient_and_the_filter_needs_none_afterwards():
    tail = _tail()
    tail.weight.grad = torch.ones_like(tail.weight)
    fitted = fit_filter(tail, _examples([1]), CONFIG)
    assert torch.equal(tail.weight.grad, torch.ones_like(tail.weight))
    assert tail.bias.grad is None
    assert not fitted.training
    assert not any(weight.requires_grad for weight in fitted.parameters())


def test_fitting_works_inside_no_grad():
    expected = _bits(fit_filter(_tail(), _examples([1]), CONFIG))
    tail = _tail()
    with torch.no_grad():
        assert torch.equal(_bits(fit_filter(tail, _examples([1]), CONFIG)), expected)


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_any_batch_size_will_do(batch_size):
    trace = Trace(every=1)
    fit_filter(_tail(), _examples([1]), replace(CONFIG, batch_size=batch_size, steps=5), trace=trace)
    assert all(torch.tensor(list(step.values())).isfinite().all() for step in trace.steps), trace.steps[-1]


def test_a_rank_wider_than_the_features_is_refused():
    with pytest.raises(SettingError):
        fit_filter(_tail(), _examples(), replace(CONFIG, rank=WIDTH + 1))


def test_nothing_to_fit_to_is_refused():
    empty = torch.arange(0)
    with pytest.raises(DataError, match="No centroid"):
        fit_filter(_tail(), replace(_examples(), rows=empty, labels=empty), CONFIG)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_centroids_that_are_not_finite_are_refused(bad):
    examples = _examples()
    examples.vectors[4, 3] = bad
    with pytest.raises(DataError, match="collect them again"):
        fit_filter(_tail(), examples, CONFIG)


def test_a_fit_that_diverges_raises():
    with pytest.raises(DataError, match="diverged"):
        fit_filter(_tail(), _examples(), replace(CONFIG, lr=1e20))


def test_adam_is_torchs_adam():
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    adam, reference = _Adam([mine], lr=0.03), torch.optim.Adam([theirs], lr=0.03)
    for _ in range(20):
        gradient = torch.randn(9) * 10 ** torch.randn(9)
        adam.step([gradient])
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(mine, theirs)


def test_sgd_is_that_of_torch_without_momentum():
    mine, theirs = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
    sgd, reference = _SGD([mine], lr=0.03), torch.optim.SGD([theirs], lr=0.03)
    for step in range(5):
        gradient = torch.sin(torch.arange(4.0) + step)
        sgd.step([gradient])
        theirs.grad = gradient.clone()
        reference.step()
    assert torch.equal(mine, theirs)


def test_the_optimizer_is_the_one_that_was_chosen():
    tail, examples = _tail(), _examples()
    adam, sgd = (fit_filter(tail, examples, replace(CONFIG, optimizer=name)) for name in ("adam", "sgd"))
    assert not torch.equal(_bits(adam), _bits(sgd))
    before = _losses(fit_filter(tail, examples, replace(CONFIG, optimizer="sgd", lr=1e-9)), examples, tail)
    after = _losses(sgd, examples, tail)
    assert after[0] < before[0] and after[1] < before[1]


@pytest.mark.parametrize(("epochs", "size", "steps"), [(3, 16, 9), (2, 60, 2), (2, 100, 2), (5, 7, 40)])
def test_epochs_are_so_many_passes_over_all_centroids(epochs, size, steps):
    trace = Trace(every=1)
    fit_filter(_tail(), _examples(), replace(CONFIG, epochs=epochs, batch_size=size), trace=trace)
    assert len(trace.steps) == steps


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"epochs": 1.5}, {"optimizer": "lbfgs"}], ids=str)
def test_a_fit_that_cannot_be_made_is_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        FilterConfig(**wrong)
