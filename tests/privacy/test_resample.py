"""Features drawn from releases: like those behind them where there is no noise, and made of nothing else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup.errors import DataError
from fedup.privacy import DP
from fedup.privacy import dp as mechanism
from fedup.privacy.dp import Layout, joint_vector, release
from fedup.privacy.resample import ROWS, resample

few = settings(max_examples=12, deadline=None, derandomize=True)
CLASSES, DIMS = 3, 4
SIZES = (900, 600, 500)


def _points(seed=0, sizes=SIZES):
    """Classes with means and covariances of their own, some rows of which are longer than the clip."""
    source = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(CLASSES, DIMS, generator=source, dtype=torch.float64)
    turns = torch.randn(CLASSES, DIMS, DIMS, generator=source, dtype=torch.float64)
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(sizes))
    draws = torch.randn(len(labels), DIMS, generator=source, dtype=torch.float64)
    return means[labels] + torch.einsum("nij,nj->ni", turns[labels], draws), labels


def _clipped(points, clip):
    norms = points.norm(dim=1, keepdim=True)
    return points / norms if clip == "unit" else points * (clip / norms).clamp(max=1)


def _dp(epsilon=1e5, clip=4.0, **options):
    return DP(epsilon, clip=clip, replay_seed=0, **options)


def _released(dp, points, labels, name="client"):
    return release(dp, joint_vector(dp, points, labels, None, CLASSES), name=(name,))


def _head(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(DIMS, CLASSES)


HEAD = _head()


def _draw(dp, released, labels=None, *, basis=None, seed=0, tail=HEAD):
    labels = torch.arange(CLASSES) if labels is None else labels
    basis = torch.eye(DIMS) if basis is None else basis
    return resample(dp, released, labels, basis=basis, num_classes=CLASSES, tail=tail, seed=seed)


def _moments(vectors):
    vectors = vectors.double()
    return vectors.mean(0), torch.cov(vectors.T, correction=0)


def _assert_like(drawn, points):
    """Mean and covariance within five deviations of those of a sample as large as the one drawn."""
    mean, covariance = _moments(points)
    found_mean, found = _moments(drawn)
    variance, n = covariance.diagonal(), len(drawn)
    spread = (torch.outer(variance, variance) + covariance.square()).sqrt()
    assert ((found_mean - mean).abs() < 5 * (variance / n).sqrt() + 1e-3).all()
    assert ((found - covariance).abs() < 5 * spread / math.sqrt(n) + 0.01 * variance.mean()).all()


# --- practically without noise


@few
@given(st.integers(0, 99), st.sampled_from([2.0, 4.0, 50.0]), st.sampled_from([1, 2, 5]))
def test_drawn_features_have_the_means_and_covariances_of_the_clipped_points(seed, clip, cells):
    points, labels = _points(seed)
    dp = _dp(clip=clip, cells=cells)
    drawn = _draw(dp, _released(dp, points, labels), seed=seed)
    for label in range(CLASSES):
        _assert_like(drawn.vectors[drawn.labels == label], _clipped(points[labels == label], clip))


def test_classes_are_drawn_in_proportion_to_their_rows():
    points, labels = _points()
    drawn = _draw(_dp(), _released(_dp(), points, labels))
    shares = torch.bincount(drawn.labels) / len(drawn.labels)
    torch.testing.assert_close(shares, torch.tensor(SIZES) / sum(SIZES), atol=1e-2, rtol=0)
    assert abs(len(drawn.labels) - ROWS) <= CLASSES


def test_what_clients_released_adds_up():
    points, labels = _points()
    dp, half = _dp(), torch.arange(len(points)) % 3 == 0
    parts = [_released(dp, points[some], labels[some], name) for some, name in ((half, "one"), (~half, "other"))]
    drawn = _draw(dp, torch.cat(parts), torch.arange(CLASSES).repeat(2))
    for label in range(CLASSES):
        _assert_like(drawn.vectors[drawn.labels == label], _clipped(points[labels == label], 4.0))


# --- where directions alone are known


@few
@given(st.integers(0, 99))
def test_unit_vectors_are_drawn_at_one_length_for_all(seed):
    points, labels = _points(seed)
    dp = _dp(clip="unit")
    drawn = _draw(dp, _released(dp, points, labels))
    unit = _clipped(points, "unit")
    lengths = [
        float(drawn.vectors[drawn.labels == label].double().square().sum(1).mean().sqrt()) for label in range(CLASSES)
    ]  # unit vectors have a mean square of 1
    assert max(lengths) < 1.1 * min(lengths)
    for label in range(CLASSES):
        _assert_like(drawn.vectors[drawn.labels == label] / lengths[label], unit[labels == label])


def test_the_length_of_unit_vectors_is_chosen_by_the_frozen_classifier():
    """A head of a quarter of the weights needs features of four times the length to say the same."""
    points, labels = _points()
    dp, heads = _dp(clip="unit"), torch.stack([points[labels == label].mean(0) for label in range(CLASSES)]).float()
    released, lengths = _released(dp, points, labels), []
    for factor in (1.0, 0.25):
        drawn = _draw(dp, released, tail=lambda vectors, factor=factor: factor * vectors @ heads.T)
        lengths.append(float(drawn.vectors.norm(dim=1).mean()))
    assert lengths[1] == pytest.approx(4 * lengths[0], rel=1e-3)


# --- noise


@few
@given(st.integers(0, 999), st.sampled_from([1, 3]))
def test_classes_without_a_row_are_left_out_whatever_the_noise(seed, cells):
    points, labels = _points(sizes=(900, 0, 0))
    dp = DP(1.0, clip=4.0, cells=cells, replay_seed=seed)
    assert _draw(dp, _released(dp, points, labels)).labels.unique().tolist() == [0]


def test_the_more_clients_released_the_more_must_stand_out():
    """Noise of a sum over many clients is larger than that of one."""
    points, labels = _points(sizes=(900, 0, 0))
    released = [_released(_dp(1.0), points, labels, f"client {i}") for i in range(50)]
    drawn = _draw(_dp(1.0), torch.cat(released), torch.arange(CLASSES).repeat(50))
    assert drawn.labels.unique().tolist() == [0]


def test_a_spread_that_noise_made_impossible_is_taken_for_none():
    dp, layout = _dp(), Layout(DIMS, 1, full=True)
    mean, rows = torch.tensor([[0.5, -0.2, 0.1, 0.0]]).double(), 1000
    told = layout.squares(mean)[0] - 0.05 * layout.squares(torch.eye(DIMS).double()).sum(0)  # variances of -0.05
    parts = rows * mean, torch.tensor([rows * dp.count_weight]).double(), rows * dp.spread_weight * told
    drawn = _draw(dp, layout.join(*parts)[None], torch.tensor([0])).vectors
    assert (drawn.mean(0) - dp.scale * mean[0]).norm() < 0.01
    assert drawn.std(0).max() < 0.01


def test_where_no_class_stands_out_there_is_nothing_to_draw():
    for epsilon, sizes in ((1.0, (5, 5, 5)), (0.01, SIZES)):
        points, labels = _points(sizes=sizes)
        with pytest.raises(DataError, match="Use a larger one"):
            _draw(_dp(epsilon), _released(_dp(epsilon), points, labels))


# --- post-processing


@pytest.mark.parametrize("cells", [1, 3])
def test_where_variances_alone_are_released_they_are_drawn_and_nothing_beside_them(cells, monkeypatch):
    monkeypatch.setattr(mechanism, "_LARGEST_SPREAD", 0)
    points, labels = _points()
    dp = _dp(cells=cells)
    assert not Layout.of(dp, DIMS, CLASSES).full
    drawn = _draw(dp, _released(dp, points, labels))
    for label in range(CLASSES):
        mean, covariance = _moments(_clipped(points[labels == label], 4.0))
        found_mean, found = _moments(drawn.vectors[drawn.labels == label])
        variance, n = covariance.diagonal(), int((drawn.labels == label).sum())
        assert ((found_mean - mean).abs() < 5 * (variance / n).sqrt() + 1e-3).all()
        assert ((found.diagonal() - variance).abs() < 5 * variance * math.sqrt(2 / n) + 0.01 * variance.mean()).all()
