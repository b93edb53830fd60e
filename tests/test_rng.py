import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.rng import generator, seed_for

names = st.lists(st.integers(0, 999) | st.sampled_from(["cell", "noise", "round"]), max_size=4)


def test_a_seed_is_the_same_in_every_process_and_release():
    assert seed_for(0, "batches", 3) == 7057784065625446175
    assert seed_for(7, "kmeans", "cell", 4, 2, 17, 18) == 5761923730958714287


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(), names, st.integers(-5, 5), names)
def test_streams_are_equal_exactly_when_seed_and_names_are_and_fit_torch_and_numpy(seed, path, other_seed, other_path):
    same = (seed, path) == (other_seed, other_path)
    assert (seed_for(seed, *path) == seed_for(other_seed, *other_path)) == same
    assert 0 <= seed_for(seed, *path) < 2**63
    assert seed_for(0, 1, 23) != seed_for(0, 12, 3) != seed_for(0, 123)  # the boundary between names counts


def test_draws_neither_depend_on_what_was_drawn_before_nor_touch_the_global_stream():
    expected = torch.randn(8, generator=generator(0, "noise", 1))
    torch.rand(5, generator=generator(0, "noise", 2))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        torch.rand(3)
        before = torch.random.get_rng_state()
        assert torch.equal(torch.randn(8, generator=generator(0, "noise", 1)), expected)
        assert torch.equal(torch.random.get_rng_state(), before)
