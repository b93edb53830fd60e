"""How a client trains: settings, batches and jobs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.engines._federations import make_federation, make_model, train_locally
from torch.nn.functional import cross_entropy

from fedup import LocalTraining
from fedup.errors import SettingError
from fedup.training.local import Job, full_batches

few = settings(max_examples=25, deadline=None, derandomize=True)
row_counts, batch_sizes, epoch_counts = st.integers(0, 150), st.integers(1, 70), st.integers(1, 3)
NAN, INF = float("nan"), float("inf")
DATA = make_federation((200,))


def make_job(n=50, *, seed=3, client=0, share=1.0, **how):
    return Job(client, torch.arange(n) + 1000, LocalTraining(**how), seed, share)


@few
@given(st.integers(1, 200), batch_sizes, st.integers(0, 99))
def test_batches_are_of_one_size_and_reach_every_row(n, size, seed):
    batches = full_batches(n, size, torch.Generator().manual_seed(seed))
    assert batches.shape[1] == max(2, min(n, size))
    seen = batches.flatten().bincount(minlength=n)
    assert {int(seen.min()), int(seen.max())} <= {1, 2}
    assert int((seen == 2).sum()) < batches.shape[1]  # only the last batch is filled up
    assert n == 1 or all(len(batch.unique()) == len(batch) for batch in batches)


def test_one_row_counts_twice_and_no_row_makes_no_batch():
    assert full_batches(1, 64, torch.Generator()).tolist() == [[0, 0]]
    assert len(full_batches(0, 64, torch.Generator())) == 0


@few
@given(row_counts, batch_sizes, epoch_counts)
def test_steps_and_sizes_foretold_are_those_of_the_batches_and_each_epoch_has_every_row(n, size, epochs):
    job = make_job(n, batch_size=size, epochs=epochs)
    assert job.batches().shape == (job.steps, job.size)
    assert (job.steps, job.size) == (job.local.steps_of(n), job.local.batch_of(n))
    assert job.size <= max(2, size)
    for epoch in job.batches().view(epochs, -1) if n else ():
        seen = (epoch - 1000).bincount(minlength=n)
        assert len(seen) == n  # no row but its own
        assert {int(seen.min()), int(seen.max())} <= {1, 2}


def test_batches_depend_on_nothing_but_the_seed_and_the_rows():
    expected = make_job().batches()
    others = make_job(client=7), make_job(share=0.1), make_job(lr=1.0, optimizer="adam", precision="bfloat16")
    with torch.random.fork_rng():
        torch.manual_seed(99)
        assert all(torch.equal(job.batches(), expected) for job in others)
        assert all(torch.equal(job.batches(), expected) for job in others)  # asked again
    assert not torch.equal(make_job(seed=4).batches(), expected)


def test_rows_take_their_places_by_number_whatever_they_are():
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:50]
    places = make_job().batches() - 1000
    assert torch.equal(Job(0, rows, LocalTraining(), seed=3).batches(), rows[places])


def test_a_job_shuffles_each_epoch_anew_and_the_first_the_same_however_many_follow():
    one, three = (make_job(epochs=epochs, batch_size=16).batches() for epochs in (1, 3))
    first, second, third = three.view(3, *one.shape)
    assert torch.equal(first, one)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_dropout_draws_from_a_stream_of_its_own_for_each_job():
    seeds = [make_job(seed=seed).dropout_seed for seed in range(50)]
    assert len({*seeds, *range(50)}) == 100
    assert make_job(seed=3, client=7).dropout_seed == make_job(seed=3).dropout_seed


odd_settings = (
    st.tuples(st.sampled_from(["epochs", "batch_size"]), st.integers(max_value=0))
    | st.tuples(st.just("lr"), st.floats(max_value=0) | st.sampled_from([NAN, INF]))
    | st.tuples(st.just("momentum"), st.floats(max_value=-0.001) | st.floats(min_value=1) | st.just(NAN))
    | st.tuples(st.just("weight_decay"), st.floats(max_value=-0.001) | st.sampled_from([NAN, INF]))
    | st.tuples(st.sampled_from(["optimizer", "precision"]), st.sampled_from(["lion", "float16", "", None]))
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(odd_settings)
@example(("momentum", 1.0))
@example(("lr", 0.0))
def test_training_settings_out_of_range_are_refused_by_name(setting):
    name, value = setting
    with pytest.raises(SettingError, match=name):
        LocalTraining(**{name: value})


def trained(model, how, *, x=DATA.x, y=DATA.y):
    """The model, after a client with all rows has trained it."""
    train_locally(model, x, y, torch.arange(len(x)), local=how, seed=0)
    return model


def test_automatic_precision_is_single_on_a_cpu_to_the_bit():
    x = make_federation((100,), images=True).x
    auto, single = (
        trained(make_model("convolution"), LocalTraining(batch_size=16, precision=precision), x=x, y=DATA.y[:100])
        for precision in ("auto", "float32")
    )
    assert all(map(torch.equal, auto.state_dict().values(), single.state_dict().values()))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_precision_trains_and_keeps_weights_in_single(optimizer):
    start, single, half = (make_model("plain") for _ in range(3))
    for model, precision in ((single, "float32"), (half, "bfloat16")):
        trained(model, LocalTraining(10, 16, lr=0.01, optimizer=optimizer, precision=precision))
    before, after = (cross_entropy(model.eval()(DATA.x), DATA.y).item() for model in (start, half))
    assert after < 0.7 * before
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.float32}
    assert any(bool((tensor != tensor.bfloat16()).any()) for tensor in half.parameters())  # nor rounded to half
    assert not torch.equal(half[0].weight, single[0].weight)  # half was at work
    torch.testing.assert_close(half[0].weight, single[0].weight, atol=0.1, rtol=0.1)
