"""The running average: against brute force, and what it leaves alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup.training.averaging import RunningAverage, weights_of

few = settings(max_examples=25, deadline=None, derandomize=True)
SHAPES = {"weight": (4, 3), "bias": (3,), "scale": ()}
rounds_of_sizes = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6), min_size=1, max_size=3)
counters = st.lists(st.integers(-50, 50), min_size=3, max_size=3)


def draw(seed):
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def copied(weights):
    return {name: tensor.clone() for name, tensor in weights.items()}


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def averaged(start, clients, shares=None):
    """The global weights after one round."""
    average = RunningAverage(start)
    for weights, share in zip(clients, shares or [1 / len(clients)] * len(clients), strict=True):
        average.add(weights, share)
    average.finish()
    return average.current


@few
@given(rounds_of_sizes, st.integers(0, 99))
def test_each_round_gives_the_weighted_mean_of_its_clients(rounds, seed):
    average = RunningAverage(draw(seed))
    for index, sizes in enumerate(rounds):
        clients = [draw(1000 * seed + 10 * index + client) for client in range(len(sizes))]
        for weights, size in zip(clients, sizes, strict=True):
            average.add(weights, size / sum(sizes))
        average.finish()
        for name in SHAPES:
            mean = sum(size * each[name].double() for each, size in zip(clients, sizes, strict=True)) / sum(sizes)
            torch.testing.assert_close(average.current[name], mean.float(), atol=1e-6, rtol=1e-5)


@few
@given(counters, st.lists(counters, min_size=1, max_size=5), st.sampled_from([torch.int64, torch.int8, torch.bool]))
def test_counters_take_the_largest_that_a_client_has_and_never_a_mean(start, clients, dtype):
    before, *after = ({**draw(0), "count": torch.tensor(values).to(dtype)} for values in (start, *clients))
    found = averaged(before, after)["count"]
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack([weights["count"] for weights in after]).amax(0))


def test_counters_start_anew_each_round():
    average = RunningAverage({**draw(0), "count": torch.tensor(9), "seen": torch.tensor(True)})
    for counts in ([7, 5], [2, 3]):
        for count in counts:
            average.add({**draw(1), "count": torch.tensor(count), "seen": torch.tensor(count > 4)}, 0.5)
        average.finish()
    assert (int(average.current["count"]), bool(average.current["seen"])) == (3, False)


def test_a_single_client_gives_its_own_bits():
    assert same_bits(averaged(draw(0), [draw(1)]), draw(1))


def test_global_weights_stay_until_the_round_is_over_and_clients_are_only_read():
    average, clients = RunningAverage(draw(0)), [draw(1), draw(2)]
    for weights in clients:
        average.add(weights, 0.5)
        assert same_bits(average.current, draw(0))
    average.finish()
    assert not same_bits(average.current, draw(0))
    assert all(same_bits(weights, draw(seed)) for weights, seed in zip(clients, (1, 2), strict=True))


def test_a_round_in_which_nobody_trained_changes_nothing():
    average = RunningAverage({**draw(0), "count": torch.tensor(4)})
    for clients in ([], [draw(1), draw(2)], [], []):
        for weights in clients:
            average.add({**weights, "count": torch.tensor(6)}, 0.5)
        before = copied(average.current)
        average.finish()
        assert same_bits(average.current, before) == (clients == [])


def test_loading_copies_the_global_weights_by_name_into_all_sets_at_once():
    start = {**draw(0), "count": torch.tensor(4)}
    expected, average = copied(start), RunningAverage(start)
    clients = [{"count": torch.tensor(seed), **draw(seed)} for seed in range(1, 6)]
    places = [tensor.data_ptr() for weights in clients for tensor in weights.values()]
    average.load(*clients)
    assert all(same_bits(weights, expected) for weights in clients)
    assert places == [tensor.data_ptr() for weights in clients for tensor in weights.values()]
    for tensor in (*clients[0].values(), *start.values()):
        tensor.add_(1)
    assert same_bits(average.current, expected)


@pytest.mark.parametrize("client_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_weights_keep_their_strides_and_values(client_format):
    source = torch.Generator().manual_seed(0)
    filters = [torch.randn(8, 4, 3, 3, generator=source) for _ in range(4)]
    start = filters[0].contiguous(memory_format=torch.channels_last)
    assert start.stride() != filters[0].stride()
    average = RunningAverage({"filters": start})
    for first, second in (filters[:2], filters[2:]):  # two rounds: sum and global weights change places
        for each in (first, second):
            average.add({"filters": each.contiguous(memory_format=client_format)}, 0.5)
        average.finish()
        loaded = torch.zeros_like(filters[0]).contiguous(memory_format=client_format)
        average.load({"filters": loaded})
        assert average.current["filters"].stride() == start.stride()
        for found in (average.current["filters"], loaded):
            torch.testing.assert_close(found, (first + second) / 2)
        assert loaded.is_contiguous(memory_format=client_format)


class Tied(nn.Module):
    """One weight under two names, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(2), persistent=False)


def test_the_weights_of_a_model_are_all_it_holds_once_and_in_its_own_memory():
    model = Tied()
    weights = weights_of(model)
    assert weights.keys() - {"seen"} == model.state_dict().keys() - {"outer.weight"}
    assert not any(tensor.requires_grad for tensor in weights.values())
    more = {name: tensor + 1 for name, tensor in weights.items()}
    RunningAverage(more).load(weights)
    assert same_bits(weights_of(model), more)
    assert torch.equal(model.outer.weight, more["inner.weight"])
