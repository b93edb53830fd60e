import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup.errors import DataError, RequestError
from fedup.federation import Client
from fedup.statistics.centroids import CentroidConfig, Summary, summarize
from fedup.statistics.client_data import ClientData
from fedup.statistics.kmeans import centroid_count

few = settings(max_examples=15, deadline=None, derandomize=True)
NAN, INF = float("nan"), float("inf")
CLASSES = 3


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU(), nn.Linear(16, CLASSES))


def make_data(n: int = 320) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=source), torch.randint(CLASSES, (n,), generator=source)


X, Y = make_data()
ROWS = torch.arange(20, 320)  # more than one batch of features; rows below 20 belong to others
MODEL = make_model()


def held(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, model: nn.Module = MODEL) -> ClientData:
    return ClientData(model, x, y, Client(7, rows, rows[:0], rows[:0]), CLASSES)


def ask(x: torch.Tensor = X, *, rows: torch.Tensor = ROWS, model: nn.Module = MODEL, cut: str = "4", **more) -> Summary:
    how = more.pop("how", CentroidConfig(0.5, seed=3))
    return summarize(held(x, Y, rows, model), cut, how, **more)


def by_label(summary: Summary) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    sizes = list(summary.sizes)
    cells = zip(summary.vectors.split(sizes), summary.counts.split(sizes), strict=True)
    return dict(zip(summary.labels, cells, strict=True))


def assert_same_bits(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


BY_CLASS = ROWS[Y[ROWS].argsort(stable=True)]  # the order in which features are read, 256 at a time
excluded_rows = st.frozensets(st.integers(20, 319), max_size=60) | st.sampled_from(
    [frozenset(BY_CLASS[:256].tolist()), frozenset(BY_CLASS[256:].tolist())]  # whole batches, and with them cells
)


def test_ratio_one_gives_the_features_of_the_frozen_model():
    model = make_model()
    with torch.no_grad():
        features = model.eval()[:4](X)
    for label, (vectors, counts) in by_label(ask(how=CentroidConfig(1.0), model=model)).items():
        torch.testing.assert_close(vectors, features[ROWS[Y[ROWS] == label]])
        assert set(counts.tolist()) == {1}


class Wary(nn.Module):
    """Passes rows on, and fails as soon as it is shown a NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any(), "a row that must not be read was read"
        return x


@few
@given(excluded_rows)
def test_excluded_rows_are_never_read(excluded):
    poisoned = X.clone()
    poisoned[sorted(excluded)] = NAN
    poisoned[:20] = NAN  # nor those of other clients
    wary = nn.Sequential(Wary(), *MODEL)
    expected, summary = ask(excluded=excluded), ask(poisoned, model=wary, cut="5", excluded=excluded)
    assert_same_bits((summary.vectors, summary.counts), (expected.vectors, expected.counts))
    assert summary.sizes == expected.sizes


@few
@given(excluded_rows, st.frozensets(st.integers(0, 2), min_size=1))
def test_asking_for_some_cells_gives_the_same_bits_as_asking_for_all(excluded, labels):
    some, everything = ask(excluded=excluded, labels=labels), by_label(ask(excluded=excluded))
    assert set(some.labels) == labels
    for label, cell in by_label(some).items():
        assert_same_bits(cell, everything[label])


@few
@given(excluded_rows)
def test_centroids_stand_for_all_retained_rows_of_their_cell(excluded):
    summary = ask(excluded=excluded)
    for label, ids, (vectors, counts) in zip(summary.labels, summary.excluded, by_label(summary).values(), strict=True):
        held = set(ROWS[Y[ROWS] == label].tolist())
        assert ids == excluded & held and int(counts.sum()) == len(held - excluded)
        assert len(vectors) == centroid_count(len(held - excluded), 0.5)


def test_a_client_without_rows_or_asked_for_no_cell_sends_none():
    for summary in (ask(rows=ROWS[:0]), ask(labels=frozenset())):
        assert (summary.labels, summary.sizes) == ((), ()) and summary.vectors.shape == (0, 16)
        assert summary.counts.shape == (0,)


def test_noise_has_the_deviation_asked_for_and_follows_the_seed():
    wanted = ((0.0, 3), (0.1, 3), (0.1, 3), (0.1, 4))
    clean, noisy, again, other = (ask(how=CentroidConfig(1.0, sigma, seed)).vectors for sigma, seed in wanted)
    assert torch.equal(noisy, again) and not torch.equal(noisy, other)
    noise = noisy - clean
    assert float(noise.std()) == pytest.approx(0.1, rel=0.05) and abs(float(noise.mean())) < 0.005


def test_the_noise_of_a_cell_is_another_without_one_of_its_rows():
    """Else the difference of the two messages would show the row."""
    *rest, last = BY_CLASS.tolist()
    clean, noisy, fewer = (
        ask(how=CentroidConfig(1.0, sigma, 3), excluded=gone).vectors[: len(rest)]
        for sigma, gone in ((0.0, frozenset()), (0.1, frozenset()), (0.1, frozenset([last])))
    )
    same = torch.isclose(noisy - clean, fewer - clean, atol=1e-6)
    assert torch.equal(same.all(1), Y[rest] != Y[last])


def test_nan_inputs_are_named_and_refused():
    poisoned = X.clone()
    poisoned[[25, 300]] = NAN
    with pytest.raises(DataError, match=r"2 of 300 rows have NaN.*row (25|300)"):
        ask(poisoned)


@pytest.mark.parametrize("ids", [{19}, {320}, {25, 10**9}])
def test_excluding_rows_the_client_does_not_hold_is_refused(ids):
    with pytest.raises(RequestError, match="Client 7 was not trained on 1"):
        ask(excluded=frozenset(ids))
