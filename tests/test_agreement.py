"""Nodes compared with each other: liars are found, nobody can make an honest node look like one, and honest noise is
within its bounds."""

from statistics import median_low

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup import DP
from fedup.clients.agreement import Profile, mistaken, too_long, too_many_rows, weighted_median
from fedup.clients.intake import _of_release
from fedup.errors import DataError
from fedup.privacy.dp import Layout, joint_vector, release
from fedup.statistics.centroids import Summary

CLASSES, WIDTH, NODES = 6, 12, 9
CENTRES = 4 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)).abs()


def answers(means):
    """A last layer that knows the classes: the nearest centre."""
    return torch.cdist(means.double(), CENTRES.double()).argmin(1)


def node(seed, shift=0, labels=range(CLASSES), rows=20.0, scale=1.0):
    """A node with rows of some classes; with a shift it calls class c by the name of c + shift."""
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed))
    means = scale * (CENTRES[list(labels)] + 0.3 * noise)
    named = tuple((label + shift) % CLASSES for label in labels)
    return Profile(
        named, torch.full((len(named),), rows), means, float(means.norm(dim=1).max()), torch.zeros(len(named))
    )


def everybody(attackers=()):
    few = [range(CLASSES), range(3), range(2, 6), range(1, 5)]
    honest = {i: node(i, labels=few[i % 4], rows=10.0 + 7 * i) for i in range(NODES)}
    return honest | {100 + i: attacker for i, attacker in enumerate(attackers)}


def test_liars_are_found_also_in_pairs_and_where_they_claim_many_rows_and_nobody_else_is():
    assert mistaken(everybody(), answers, CLASSES) == {}
    for pair in ([node(50, shift=1)], [node(50, shift=1, rows=1e6), node(51, shift=1, rows=1e6)]):
        assert set(mistaken(everybody(pair), answers, CLASSES)) == {100 + i for i in range(len(pair))}
        assert set(mistaken(everybody(pair), None, CLASSES)) == {100 + i for i in range(len(pair))}
    one_class = Profile((4,), torch.tensor([1000.0]), CENTRES[[1]], 1.0, torch.zeros(1))
    honest_and_one = node(50, labels=range(CLASSES), rows=900.0)
    mixed = Profile(
        (*honest_and_one.labels[:4], 4),
        torch.cat([honest_and_one.rows[:4], one_class.rows]),
        torch.cat([honest_and_one.means[:4], one_class.means]),
        1.0,
        torch.zeros(5),
    )
    assert set(mistaken(everybody([mixed]), answers, CLASSES)) == {100}  # a fifth of its rows, most of a class


def test_a_class_that_the_model_knows_badly_or_few_hold_is_no_evidence():
    never_right = lambda means: torch.full((len(means),), 0)  # noqa: E731
    assert mistaken(everybody(), never_right, CLASSES) == {}
    rare = {i: node(i, labels=range(4)) for i in range(NODES)} | {50: node(50, labels=[4, 5]), 51: node(51, labels=[4])}
    assert mistaken(rare, never_right, CLASSES) == {}
    assert set(mistaken(rare | {52: node(52, shift=4, labels=[0, 1])}, answers, CLASSES)) == {52}  # within 0 and 1


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_node_cannot_make_another_look_like_a_liar(data):
    labels = tuple(sorted(data.draw(st.sets(st.integers(0, CLASSES - 1), min_size=1))))
    scale = data.draw(st.sampled_from([0.0, 1e-3, 1.0, -1.0, 30.0, 1e12]))
    towards = data.draw(st.lists(st.integers(0, CLASSES - 1), min_size=len(labels), max_size=len(labels)))
    rows = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 5.0, 90.0, 1e9]), min_size=len(labels), max_size=len(labels)))
    )
    means = scale * CENTRES[towards] + torch.randn(len(labels), WIDTH)
    attacker = Profile(labels, rows, means, float(means.norm(dim=1).max()), torch.zeros(len(labels)))
    profiles = everybody([attacker])
    declared = dict.fromkeys(range(NODES), 1000)
    for found in (
        too_long(profiles),
        too_many_rows(profiles, {}, 30.0),
        too_many_rows(profiles, declared, 30.0),
        mistaken(profiles, answers, CLASSES),
        mistaken(profiles, None, CLASSES),
    ):
        assert set(found) <= {100}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.floats(0.1, 1e9), st.integers(0, 10**6))
def test_a_median_lies_among_the_honest_points_whatever_a_minority_weighs(honest, weight, seed):
    source = torch.Generator().manual_seed(seed)
    points = list(torch.randn(honest, 3, generator=source).double())
    bad = [torch.full((3,), 1e9).double()] * ((honest - 1) // 2)
    middle = weighted_median([*bad, *points], [weight] * len(bad) + [7.0] * honest)
    assert bool((middle <= torch.stack(points).max(0).values).all())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([-1e29, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0 + 2**-23, 3e29]), min_size=1))
def test_a_median_of_equal_weights_is_the_middle_point(numbers):
    points = [torch.tensor([number, -number]) for number in numbers]
    middle = weighted_median(points, [7.0] * len(points))
    for column, found in zip(torch.stack(points).T.tolist(), middle.tolist(), strict=True):
        assert found == median_low(column)


class Facts:
    """What a server knows of a projection."""

    num_classes = CLASSES

    def projected(self, cut, dp):
        return WIDTH


@pytest.mark.parametrize(
    "dp", [DP(0.5, clip="unit"), DP(8.0, clip=3.0, cells=3), DP(100.0, clip="unit", count_weight=2.0)]
)
def test_honest_releases_are_within_the_bounds_of_their_noise_and_scaled_ones_are_not(dp):
    source = torch.Generator().manual_seed(1)
    for rows in (0, 1, 40, 300):
        points, labels = (
            5 * torch.randn(rows, WIDTH, generator=source).double(),
            torch.randint(CLASSES, (rows,), generator=source),
        )
        exact = joint_vector(dp, points, labels, None, CLASSES)
        assert exact.shape[1] == Layout.of(dp, WIDTH, CLASSES).size
        for _ in range(10):
            vectors = release(dp, exact, name=())
            profile = _of_release(summary(vectors), dp, Facts(), "head")
            assert abs(profile.total - rows) <= 60 * dp.sigma / dp.count_weight
    with pytest.raises(DataError):
        _of_release(summary(-1000 * vectors), dp, Facts(), "head")
    longer = vectors.clone()
    longer[:, : dp.cells * WIDTH] *= 1000
    with pytest.raises(DataError, match="longer than its rows"):
        _of_release(summary(longer), dp, Facts(), "head")


def summary(vectors):
    every = tuple(range(CLASSES))
    counts = torch.ones(CLASSES, dtype=torch.int32)
    return Summary(0, every, (1,) * CLASSES, (frozenset(),) * CLASSES, vectors, counts, False, (WIDTH,))
