"""How many threads torch computes with: what suits the work, what the user asked for, and what it was before."""

import pytest
import torch
from torch import nn

from fedup import Federation, FilterConfig, LocalTraining, Runtime, federate, fingerprint, iid
from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import FedUPWarning, SettingError
from fedup.filters.fit import Examples, fit_filter
from fedup.threads import (
    SMALL_BATCH,
    VARIABLE,
    _work_of_a_row,
    asked_threads,
    fixed_threads,
    threads_for,
    threads_for_training,
    using_threads,
)
from fedup.training.fedavg import Observer

LOCAL = LocalTraining(batch_size=8)


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    """As on a machine with three cores, and nobody has asked for anything."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with using_threads(3):
        yield


def _federation(width=8):
    torch.manual_seed(0)
    x, y = torch.randn(60, width), torch.arange(60) % 3
    return Federation.split(x, y, iid(y, 3), num_classes=3)


def _model(width=8, hidden=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3))


class Seen(Observer):
    """Threads that torch has in each round, and what training says when it starts."""

    def __init__(self, stop_after=None):
        self.threads, self.started, self._stop_after = [], [], stop_after

    def on_start(self, rounds_done, threads):
        self.started.append((rounds_done, threads))

    def on_round(self, round_index, model):
        self.threads.append(torch.get_num_threads())

    def on_update(self, round_index, client, **_):
        if round_index == self._stop_after:
            raise KeyboardInterrupt


# --- the choice


def test_little_work_gets_one_thread_and_much_what_torch_has():
    assert threads_for(SMALL_BATCH - 1) == 1
    assert threads_for(SMALL_BATCH) == 3
    with using_threads(1):
        assert threads_for(SMALL_BATCH) == 1
    example, model = torch.randn(1, 1000), nn.Linear(1000, 1000)
    assert [threads_for_training(model, example, batch_size) for batch_size in (8, 16)] == [1, 3]


class Own(nn.Module):
    """A weight that no known layer uses, and random numbers in every pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))

    def forward(self, x):
        torch.rand(1)
        return x @ self.weight


def test_work_is_the_multiply_adds_of_a_row():
    for model, shape, work in (
        (nn.Linear(5, 7), (5,), 35),
        (nn.Linear(5, 7), (4, 5), 140),  # at each of four positions
        (nn.Conv2d(4, 4, 3, padding=1, groups=2), (4, 6, 6), 4 * 36 * 18),
        (Own(), (5,), 35),
        (nn.Bilinear(5, 5, 7), (5,), float("inf")),  # cannot be called so: training will say it
    ):
        assert _work_of_a_row(model, torch.randn(2, *shape)) == work


def test_looking_at_a_model_changes_neither_it_nor_what_is_drawn_next():
    model = Own().train()
    before, state = fingerprint(model), torch.get_rng_state()
    threads_for_training(model, torch.ones(1, 5), 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(model) == before and model.training and not model._forward_hooks


# --- what the user asked for


def test_what_was_asked_for_comes_before_what_suits(monkeypatch):
    assert asked_threads() is None
    monkeypatch.setenv(VARIABLE, "2")
    assert asked_threads() == threads_for(1) == threads_for(SMALL_BATCH) == 2
    with fixed_threads(4):
        assert asked_threads() == threads_for(1) == torch.get_num_threads() == 4
    assert asked_threads() == 2 and torch.get_num_threads() == 3


def test_a_variable_that_is_no_number_of_threads_is_refused(monkeypatch):
    for text in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(SettingError, match=VARIABLE):
            threads_for(1)


def test_the_number_is_as_before_after_an_error():
    for block in (using_threads, fixed_threads):
        with pytest.raises(KeyboardInterrupt), block(1):
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 3 and asked_threads() is None


# --- training


def test_training_takes_the_threads_that_suit_it_or_that_it_is_given():
    for hidden, batch_size, runtime, expected in ((4, 8, None, 1), (2000, 1000, None, 3), (4, 8, 2, 2)):
        seen, local = Seen(), LocalTraining(batch_size=batch_size)
        options = {"rounds": 2, "local": local, "observers": [seen], "runtime": Runtime(threads=runtime)}
        assert federate(_model(hidden=hidden), _federation(), **options).threads == expected
        assert (seen.threads, seen.started) == ([expected] * 2, [(0, expected)])
        assert torch.get_num_threads() == 3
    with pytest.raises(SettingError, match="threads must be 1 or more"):
        Runtime(threads=0)


def _interrupt(path, threads=None):
    seen, runtime = Seen(stop_after=2), Runtime(checkpoint=path, threads=threads)
    with pytest.raises(KeyboardInterrupt):
        federate(_model(), _federation(), rounds=4, local=LOCAL, observers=[seen], runtime=runtime)


def _go_on(path, threads=None):
    seen, runtime = Seen(), Runtime(checkpoint=path, threads=threads)
    return federate(_model(), _federation(), rounds=4, local=LOCAL, observers=[seen], runtime=runtime), seen


def test_a_resumed_training_keeps_the_threads_it_began_with(tmp_path):
    path = tmp_path / "checkpoint"
    _interrupt(path, threads=2)
    assert load_tensors(path, kind="checkpoint")[1]["threads"] == 2
    trained, seen = _go_on(path)
    assert trained.threads == 2 and seen.threads == [2, 2] and seen.started == [(2, 2)]
    whole = federate(_model(), _federation(), rounds=4, local=LOCAL, runtime=Runtime(threads=2))
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), whole.model.parameters(), strict=True))


def test_other_threads_than_before_are_used_on_demand_or_where_torch_has_fewer_and_said(tmp_path):
    _interrupt(tmp_path / "one", threads=2)
    with pytest.warns(FedUPWarning, match="trained with 2 threads, and the others will be with 1"):
        assert _go_on(tmp_path / "one", threads=1)[0].threads == 1
    _interrupt(tmp_path / "other", threads=3)
    with using_threads(2), pytest.warns(FedUPWarning, match="with 3 threads, and the others will be with 2"):
        assert _go_on(tmp_path / "other")[0].threads == 2


def test_an_older_checkpoint_still_works_and_the_time_is_that_of_all_rounds(tmp_path):
    path = tmp_path / "checkpoint"
    for more, expected in (({}, 0), ({"threads": 1, "time_s": 5000.0}, 5000)):
        path.unlink(missing_ok=True)
        _interrupt(path)
        tensors, header = load_tensors(path, kind="checkpoint")
        assert header["time_s"] > 0
        header = {name: header[name] for name in ("rounds", "settings")} | more
        save_tensors(path, tensors, kind="checkpoint", header=header)
        trained, _ = _go_on(path)
        assert trained.threads == 1
        assert expected < trained.time_s < expected + 600


# --- the fit of a filter


@pytest.mark.parametrize(("width", "threads"), [(16, 1), (2000, 3)])
def test_a_filter_is_fitted_by_as_many_threads_as_suit_its_width(width, threads):
    seen, layer = set(), nn.Linear(width, 3)

    def tail(features):
        if torch.is_grad_enabled():
            seen.add(torch.get_num_threads())
        return layer(features)

    vectors = torch.rand(30, width)
    examples = Examples(vectors, torch.arange(30), torch.arange(30) % 3, nonnegative=True)
    fit_filter(tail, examples, FilterConfig(steps=2))
    assert seen == {threads} and torch.get_num_threads() == 3


def test_blocks_that_end_in_another_order_than_they_began_leave_torch_as_it_was():
    before = torch.get_num_threads()
    first, second = using_threads(before + 1), using_threads(before + 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_num_threads() == before + 2
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == before
