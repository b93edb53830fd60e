"""Features as positions × channels: nothing is lost, and channels stay what they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import SettingError
from fedup.models.layout import from_positions, known_granularity, to_positions

few = settings(max_examples=30, deadline=None, derandomize=True)
sizes = st.integers(1, 5)
shapes = st.tuples(sizes) | st.tuples(sizes, sizes) | st.tuples(sizes, sizes, sizes) | st.tuples(*[sizes] * 4)
overs = st.sampled_from(["each", "tokens"])


def _rows(count, shape):
    return torch.arange(float(count * torch.Size(shape).numel())).reshape(count, *shape)


@few
@given(st.integers(1, 4), shapes, overs)
def test_from_positions_undoes_to_positions(count, shape, over):
    features = _rows(count, shape)
    assert torch.equal(from_positions(to_positions(features, over), shape), features)


def test_positions_and_channels_of_maps_tokens_and_vectors():
    shapes = {(6, 2, 5): ((10, 6), (1, 6)), (4, 7): ((4, 7), (1, 7)), (9,): ((1, 9), (1, 9))}
    for shape, expected in shapes.items():
        assert tuple(to_positions(_rows(3, shape), over).shape[1:] for over in ("each", "tokens")) == expected


def test_the_channels_of_a_map_come_first_and_positions_run_along_its_lines():
    features = torch.randn(3, 6, 2, 5)
    for over, pick in (("each", lambda s, n, p: s[n, p]), ("tokens", lambda s, n, p: s[n * 10 + p, 0])):
        spread = to_positions(features, over)
        for n in range(3):
            for p in range(10):
                assert torch.equal(pick(spread, n, p), features[n, :, p // 5, p % 5])


def test_the_channels_of_tokens_come_last_and_a_row_keeps_its_tokens_together():
    features = torch.randn(3, 4, 7)
    assert torch.equal(to_positions(features, "each"), features)
    assert torch.equal(to_positions(features, "tokens")[:, 0], torch.cat(list(features)))


def test_what_a_filter_may_act_on_is_known_by_name():
    assert [known_granularity(name) for name in ("each", "tokens")] == ["each", "tokens"]
    for wrong in ("", "all", "token", "EACH", None, 1):
        with pytest.raises(SettingError, match="each, tokens"):
            known_granularity(wrong)
