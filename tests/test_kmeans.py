import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedup.statistics.kmeans import BLOCK_POINTS, centroid_count, cluster_cells

few = settings(max_examples=25, deadline=None)
ratios = st.sampled_from(["0.05", "0.1", "0.3", "0.5", "0.8", "0.95"])
random_seeds = st.integers(0, 10**6)


def cluster(features: Tensor, cells: list[Tensor], ratio: float, seeds: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Centroids and counts by cell; buffers start out full of nonsense, so that a row not written shows."""
    sizes = [centroid_count(len(cell), ratio) for cell in cells]
    out = features.new_full((sum(sizes), features.shape[1]), torch.nan)
    counts = torch.full((sum(sizes),), -1, dtype=torch.int32)
    cluster_cells(features, cells, ratio=ratio, seeds=seeds, out=out, counts=counts)
    return list(zip(out.split(sizes), counts.split(sizes), strict=True))


def draw_points(seed: int, n: int, width: int, levels: int | None = None) -> Tensor:
    """Gaussian points, or points on a coarse grid: many duplicates and ties."""
    source = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(n, width, generator=source, dtype=torch.float64)
    return torch.randint(levels, (n, width), generator=source).double()


def sizes_with_large_ones():
    return st.integers(1, 80) | st.integers(BLOCK_POINTS - 1, 3 * BLOCK_POINTS + 2)


@few
@given(st.integers(0, 100_000), st.integers(1, 1000))
def test_centroid_count_is_the_exact_ceiling(points, thousandths):
    assert centroid_count(points, thousandths / 1000) == math.ceil(Fraction(thousandths, 1000) * points)
    assert centroid_count(points, 1e-12) == min(points, 1)  # at least one


@pytest.mark.parametrize("n", [513, 1025, 2053, 2560])
def test_large_cells_fill_every_centroid_when_almost_none_is_saved(n):
    ((centroids, counts),) = cluster(draw_points(0, n, 2), [torch.arange(n)], (n - 1) / n, [0])
    assert len(centroids) == n - 1
    assert sorted(counts.tolist()) == [1] * (n - 2) + [2]


@few
@given(random_seeds, sizes_with_large_ones(), st.integers(1, 5), ratios, st.sampled_from([None, 1, 2, 6]))
def test_no_centroid_is_empty_and_weighted_by_their_counts_they_have_the_mean_of_the_points(
    seed, n, width, ratio, levels
):
    points = draw_points(seed, n, width, levels)
    before = points.clone()
    ((centroids, counts),) = cluster(points, [torch.arange(n)], float(ratio), [seed])
    assert torch.equal(points, before)
    assert len(centroids) == math.ceil(Fraction(ratio) * n)
    assert int(counts.sum()) == n
    assert int(counts.min()) >= 1
    torch.testing.assert_close((centroids * counts[:, None]).sum(0) / n, points.mean(0))


@few
@given(random_seeds, st.integers(2, 100), st.integers(1, 8), st.sampled_from(["0.1", "0.3", "0.5", "0.8", "0.95"]))
def test_centroids_are_the_means_of_the_points_nearest_to_them(seed, n, width, ratio):
    points = draw_points(seed, n, width)
    ((centroids, counts),) = cluster(points, [torch.arange(n)], float(ratio), [seed])
    nearest = (points[:, None] - centroids).square().sum(2).argmin(1)  # brute force
    assert counts.tolist() == nearest.bincount(minlength=len(centroids)).tolist()
    for i, centroid in enumerate(centroids):
        torch.testing.assert_close(centroid, points[nearest == i].mean(0))


def test_centroids_of_duplicated_points_stay_inside_their_own_cell():
    """Clusters run empty here now and then, and 64 centroids leave no padding among the clusters of a block."""
    n, cells = 200, 300
    points = draw_points(0, n * cells, 2, levels=9)
    points = torch.cat([torch.full((1, 2), 1000.0, dtype=torch.float64), points])  # a row of no cell
    rows = list(torch.arange(1, n * cells + 1).split(n))
    for i, (centroids, counts) in enumerate(cluster(points, rows, 64 / n, list(range(cells)))):
        assert float(centroids.max()) <= 8, f"cell {i} holds a row that is not its own"
        assert int(counts.sum()) == n
        assert int(counts.min()) >= 1


@few
@given(
    random_seeds,
    st.integers(1, 90) | st.integers(500, 600),
    st.lists(st.integers(0, 90) | st.integers(500, 600), max_size=6),
    st.sampled_from([2, 40]),
    ratios,
    st.booleans(),
)
def test_a_cells_bits_do_not_depend_on_the_other_cells_of_the_call(seed, n, others, width, ratio, on_grid):
    sizes = [n, *others]
    points = draw_points(seed, sum(sizes), width, levels=3 if on_grid else None).float() * 0.1  # ties, rounded
    cells = list(torch.arange(sum(sizes)).split(sizes))
    (alone,) = cluster(points, cells[:1], float(ratio), [seed])
    last = cluster(points, cells[::-1], float(ratio), [*range(len(others)), seed])[-1]
    assert torch.equal(alone[0], last[0])
    assert torch.equal(alone[1], last[1])


@few
@given(random_seeds, st.lists(st.integers(0, 600), min_size=1, max_size=4))
def test_ratio_one_gives_the_features_themselves(seed, sizes):
    points = draw_points(seed, sum(sizes), 3)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    cells = list(order.split(sizes))
    for cell, (centroids, counts) in zip(cells, cluster(points, cells, 1.0, [0] * len(cells)), strict=True):
        assert torch.equal(centroids, points[cell])
        assert counts.tolist() == [1] * len(cell)
