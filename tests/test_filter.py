import pytest
import torch

from fedup import FilterConfig
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
