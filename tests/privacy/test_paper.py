"""The paper's own accounting: its formula as printed, counted for each cell, and never called a guarantee."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Federation, collect, iid
from fedup.errors import SettingError
from fedup.privacy import paper
from fedup.privacy.paper import paper_epsilon
from fedup.statistics.centroids import CentroidConfig

few = settings(max_examples=20, deadline=None, derandomize=True)


def _features(rows, dims, seed, scale=1.0):
    return scale * torch.randn(rows, dims, generator=torch.Generator().manual_seed(seed))


def _printed(features, sigma):
    """√(2 ln(1.25/δ))·Δ/σ with δ = 1/n and Δ = max‖d_p − d_q‖/n, pair by pair."""
    n = len(features)
    widest = max(math.dist(p, q) for p in features.tolist() for q in features.tolist())
    return math.sqrt(2 * math.log(1.25 / (1 / n))) * (widest / n) / sigma


cells = st.builds(_features, st.integers(1, 45), st.integers(1, 8), st.integers(0, 999), st.floats(0.01, 100))


@few
@given(cells, st.floats(1e-4, 10))
def test_epsilon_is_that_of_the_printed_formula(features, sigma):
    assert paper_epsilon(features, sigma) == pytest.approx(_printed(features, sigma), rel=1e-3)


@few
@given(cells, st.integers(1, 9))
def test_how_many_rows_are_compared_at_once_changes_nothing(features, rows):
    whole = paper_epsilon(features, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "_ROWS", rows)
        assert paper_epsilon(features, 0.1) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_cell_of_no_row_or_one_costs_nothing_by_this_formula(rows):
    """One more reason why it is no guarantee."""
    assert paper_epsilon(_features(rows, 4, 0), 0.001) == 0


def test_features_far_from_zero_have_the_distances_that_they_have():
    features = 1000 + _features(40, 4, 0, scale=0.01)
    assert paper_epsilon(features, 0.1) == pytest.approx(_printed(features, 0.1), rel=1e-2)


@pytest.fixture(scope="module")
def setting():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        y = torch.arange(120) % 3
        x = torch.randn(120, 6) + 2 * nn.functional.one_hot(y, 6)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return model, Federation.split(x, y, iid(y, 3))


def test_every_cell_has_its_epsilon(setting):
    model, federation = setting
    store = collect(model, federation, privacy="paper", statistics=CentroidConfig(sigma=0.02))
    assert store.paper_epsilons.keys() == {cell.name for cell in store.cells}
    with torch.no_grad():
        features = model[:2](federation.x)
    for client, label in store.paper_epsilons:
        rows = federation.client(client).train
        expected = _printed(features[rows[federation.y[rows] == label]], 0.02)
        assert store.paper_epsilons[client, label] == pytest.approx(expected, rel=1e-3)


def test_it_is_only_counted_and_changes_no_centroid(setting):
    model, federation = setting
    counted, plain = (
        collect(model, federation, privacy=how, statistics=CentroidConfig(sigma=0.02)) for how in ("paper", None)
    )
    assert torch.equal(counted.vectors, plain.vectors)
    assert plain.paper_epsilons == {}
    assert counted.ledger.charges == []  # no business of the ledger


def test_noise_is_the_papers_where_none_is_given_and_never_called_a_guarantee(setting):
    model, federation = setting
    usual, exact = collect(model, federation, privacy="paper"), collect(model, federation, statistics="centroids")
    assert (usual.how.sigma, usual.how.ratio) == (paper.SIGMA, exact.how.ratio) == (0.001, exact.how.ratio)
    assert 0 < float((usual.vectors - exact.vectors).std()) < 0.0012
    assert "not a DP guarantee" in usual.how.mechanism and exact.how.mechanism == "none"
    chosen = collect(model, federation, privacy="paper", statistics=CentroidConfig(ratio=0.5)).how
    assert chosen == CentroidConfig(0.5, paper.SIGMA, paper_accounting=True)
    with pytest.raises(SettingError, match="without noise"):
        CentroidConfig(sigma=0.0, paper_accounting=True)
