import pytest
import torch
from tests._forced import unlearn
from torch import nn

from fedup import Federation, FilterConfig, Forget, collect, iid, load_filter, plug, save_filter
from fedup.errors import SettingError
from fedup.filters.bottleneck import Bottleneck

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        *({"alpha": value} for value in (-0.1, 1.1, NAN, INF)),
        *({"rank": value} for value in (0, -1)),
        *({"steps": value} for value in (0, -1)),
        *({"batch_size": value} for value in (0, -1)),
        *({"lr": value} for value in (0.0, -1.0, NAN, INF)),
        {"class_policy": "keep"},
        *({"filter": value} for value in ("none", "", None)),
        *({"max_variance_loss": value} for value in (0.0, -0.1, 1.1, NAN)),
        *({"eraser_cut": value} for value in ("", None, 2)),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(SettingError, match=next(iter(bad))):
        FilterConfig(**bad)


def test_a_rank_above_the_width_of_the_cut_is_refused():
    with pytest.raises(SettingError, match="rank 9 is wider than the 8 features"):
        Bottleneck(8, 9, nonnegative=True)


@pytest.mark.parametrize(("width", "size_bytes"), [(512, 128 * 1024), (128, 32 * 1024)])
def test_a_filter_has_the_size_of_the_papers_table(width, size_bytes):
    assert Bottleneck(width, 32, nonnegative=True).size_bytes == size_bytes


def test_a_filter_is_linear_relu_linear_without_bias():
    fitted = Bottleneck(6, 3, nonnegative=False)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = (x @ fitted.encoder.T).clamp(min=0) @ fitted.decoder.T
        torch.testing.assert_close(fitted(x), expected)
        assert not fitted(torch.zeros(1, 6)).any()
    assert float(expected.min()) < 0


def test_only_a_nonnegative_filter_ends_in_a_relu():
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        signed, rectified = Bottleneck(6, 3, nonnegative=False), Bottleneck(6, 3, nonnegative=True)
        rectified.load_state_dict(signed.state_dict())
        assert torch.equal(rectified(x), signed(x).relu())


def test_maps_keep_their_shape_and_type():
    maps = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    passed = Bottleneck(60, 4, nonnegative=True)(maps)
    assert passed.shape == maps.shape
    assert passed.dtype == torch.float64


def _pair(width=6, *, nonnegative=False):
    """The same weights acting on a row as a whole, and on each position."""
    whole = Bottleneck(width, 3, nonnegative=nonnegative)
    each = Bottleneck(width, 3, nonnegative=nonnegative, per_position=True)
    each.load_state_dict(whole.state_dict())
    return whole, each


@pytest.mark.parametrize("nonnegative", [False, True])
@torch.no_grad()
def test_per_position_each_place_of_a_map_is_filtered_by_itself(nonnegative):
    whole, each = _pair(nonnegative=nonnegative)
    maps = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))
    passed = each(maps)
    assert passed.shape == maps.shape
    for row in range(4):
        for column in range(5):
            torch.testing.assert_close(passed[:, :, row, column], whole(maps[:, :, row, column]))
    torch.testing.assert_close(each(maps.flip(3)), passed.flip(3))


@torch.no_grad()
def test_per_position_each_token_is_filtered_by_itself_and_a_vector_as_ever():
    whole, each = _pair()
    tokens = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))
    passed = each(tokens)
    assert passed.shape == tokens.shape
    for place in range(7):
        torch.testing.assert_close(passed[:, place], whole(tokens[:, place]))
    assert torch.equal(each(tokens[:, 0]), whole(tokens[:, 0]))


def test_per_position_a_filter_is_as_wide_as_the_channels():
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, 6, 6), torch.arange(60) % 3
    base = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)).eval()
    federation = Federation.split(x, y, iid(y, 2))
    plugged = plug(base, cut="2")
    store = collect(base, federation, cut="2")
    config = FilterConfig(rank=4, steps=10, per_position=True)
    unlearn(plugged, store, Forget.classes([1]), config=config)
    fitted = plugged.served.filter
    assert (fitted.width, fitted.per_position) == (6, True)
    assert fitted.size_bytes == 2 * 6 * 4 * 4
    features = base[:2](x)
    expected = base[2:](torch.stack([_one_by_one(fitted, row) for row in features]))
    torch.testing.assert_close(plugged(x), expected)
    with plugged.restored():
        assert torch.equal(plugged(x), base(x))
    with pytest.raises(SettingError, match="rank 7 is wider than the 6 features"):
        unlearn(plug(base, cut="2"), store, Forget.classes([1]), config=FilterConfig(rank=7, per_position=True))


def _one_by_one(fitted, features):
    """(C, H, W), position by position."""
    spread = features.flatten(1).T  # (P, C)
    passed = ((spread @ fitted.encoder.T).relu() @ fitted.decoder.T).relu()
    return passed.T.reshape(features.shape)


def test_per_position_survives_a_file(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(60, 1, 6, 6), torch.arange(60) % 3
    base = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)).eval()
    plugged = plug(base, cut="2")
    store = collect(base, Federation.split(x, y, iid(y, 2)), cut="2")
    unlearn(plugged, store, Forget.classes([1]), config=FilterConfig(rank=4, steps=10, per_position=True))
    save_filter(plugged, tmp_path / "f")
    other = plug(base, cut="2")
    load_filter(other, tmp_path / "f")
    assert other.served.filter.per_position
    assert torch.equal(other(x), plugged(x))
