"""What clients tell of their rows: it adds up, is about enough rows, and about nothing else."""

from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Forget
from fedup.federation import Client
from fedup.models.features import FeatureReader
from fedup.statistics.client_data import ClientData
from fedup.statistics.eraser_statistics import (
    EVERY_CLASS,
    LEAST_REFERENCE_ROWS,
    MOST_REFERENCE_ROWS,
    RowGroups,
    measure_groups,
    second_moments,
    shortened,
    sketch_groups,
)
from fedup.statistics.mixture import mixture
from fedup.statistics.moments import LEAST_ROWS, Moments, Sums

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10**6)
CLASSES, CUTS = 3, {"2": "each", "4": "each"}
NONE = torch.empty(0, dtype=torch.long)


def _source(seed):
    return torch.Generator().manual_seed(seed)


def _model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, CLASSES)).eval()


MODEL = _model()


def _data(rows=300):
    """Rows whose content follows their class."""
    y = torch.arange(rows) % CLASSES
    return torch.randn(rows, 6, generator=_source(0)) + 3 * torch.eye(6)[y], y


def _client(rows, number=0):
    return Client(number, torch.as_tensor(rows, dtype=torch.long), NONE, NONE)


def _held(x, y, client, model=MODEL):
    return ClientData(model, x, y, client, CLASSES)


def _sketch(x, y, client, question):
    return sketch_groups(_held(x, y, client), "2", question, "each")


def _measure(x, y, client, question, weights=None):
    return measure_groups(_held(x, y, client), CUTS, question, weights or {})


def _second(x, y, client, question, **options):
    return second_moments(_held(x, y, client), "2", question, **{"granularity": "each", "positions": (0,), **options})


def _all(x, y, client, question):
    """All that a client is asked."""
    weights = {name: dict.fromkeys(range(CLASSES), 0.3) for name in question.requests}
    return _sketch(x, y, client, question), _measure(x, y, client, question, weights), _second(x, y, client, question)


def _tensors(answers):
    """All tensors of such answers, in order."""
    sketches, spreads, moments = answers
    found = [one.sums for one in (*sketches.forgotten.values(), *sketches.retained.values())]
    for groups in (spreads.forgotten, spreads.reference):
        found += [t for cuts in groups.values() for one in cuts.values() for t in (one.mean, one.variance)]
    return found + ([moments.sums, moments.squares] if moments else [])


def _same(one, other):
    one, other = _tensors(one), _tensors(other)
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _at(x, rows, cut="2"):
    return FeatureReader(MODEL, cut).read(x, torch.as_tensor(rows)).values.double()


def _ask(*requests, gone=None):
    named = {f"r{i}": request for i, request in enumerate(requests)}
    joined = gone or Forget()
    for request in requests:
        joined = joined | request
    return RowGroups(named, joined)


def _samples(rows, client=0):
    return Forget.samples({client: [int(row) for row in rows]})


@few
@given(seeds, st.integers(1, 60), st.floats(-20, 20), st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_moments_of_parts_added_up_are_those_that_numpy_finds_in_all_rows(seed, count, offset, edges, diagonal):
    rows = torch.randn(count, 2, 4, generator=_source(seed)) * torch.tensor([0.1, 1, 2, 5]) + offset
    parts = [Moments.of(part, diagonal=diagonal) for part in rows.tensor_split(sorted(edges))]
    added = sum(parts[1:], start=parts[0])
    assert added.count == count
    for position in range(2):
        here = rows[:, position].double().numpy()
        expected = torch.from_numpy(np.cov(here.T, bias=True))
        torch.testing.assert_close(added.mean[position], torch.from_numpy(here.mean(0)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(added.variance[position], expected.diagonal(), atol=2e-3, rtol=1e-3)
        if not diagonal:
            torch.testing.assert_close(added.covariance[position], expected, atol=2e-3, rtol=1e-3)


def test_a_variance_is_never_negative_and_nothing_has_no_moments():
    assert Moments.of(torch.full((7, 2, 3), 1000.1), diagonal=True).variance.min() >= 0
    nothing = Moments(0, torch.zeros(2, 3), torch.zeros(2, 3, 3))
    assert nothing.mean.abs().max() == nothing.variance.abs().max() == nothing.covariance.abs().max() == 0
    assert Sums(0, torch.zeros(2, 3)).mean.abs().max() == 0
    assert Moments.of(torch.randn(3, 2, 4)).squares.dtype == torch.float64


@few
@given(seeds, st.integers(1, 8), st.floats(1e-3, 1e3))
def test_a_known_mixture_is_found_again_and_none_comes_closer_to_a_mean(seed, many, scale):
    references = scale * torch.randn(many, 3, 10, generator=_source(seed)).double()
    weights = torch.rand(many, generator=_source(seed + 1)).double()
    weights[: many // 2] = 0
    weights /= weights.sum()
    torch.testing.assert_close(_mixed(references, weights[None])[0], sum(map(mul, weights, references)))
    found = mixture(_mixed(references, weights[None])[0], list(references))
    torch.testing.assert_close(found, weights, atol=1e-3, rtol=0)
    mean = 2 * scale * torch.randn(3, 10, generator=_source(seed + 1)).double()
    others = torch.distributions.Dirichlet(torch.full((many,), 0.3).double()).sample((500,))
    found = mixture(mean, list(references))
    distance = [(_mixed(references, some) - mean).square().sum((1, 2)).min() for some in (found[None], others)]
    assert distance[0] <= distance[1] + 1e-4 * scale**2
    for shares in (found, mixture(mean, [references[0]] * 3)):
        assert shares.min() >= 0 and float(shares.sum()) == pytest.approx(1)


def _mixed(references, weights):
    return torch.einsum("nk,kpc->npc", weights, references)


@few
@given(seeds)
def test_a_client_answers_its_part_of_a_question_like_the_whole(seed):
    x, y = _data()
    rows = torch.randperm(100, generator=_source(seed))[:70]
    question = _ask(_samples(rows) | _samples([150], 1), gone=_samples([160], 1))
    client = _client(range(100))
    assert _same(_all(x, y, client, question), _all(x, y, client, question.to(0)))


@few
@given(st.integers(1, 2 * LEAST_ROWS))
def test_a_group_of_fewer_than_the_least_number_of_rows_is_not_told_of_nor_read(count):
    x, y = _data()
    large, small = range(100, 130), range(count)
    x[:count] = x[:count] if count >= LEAST_ROWS else torch.nan
    question = _ask(_samples(large), _samples(small))
    sketches, spreads, moments = _all(x, y, _client(range(200)), question)
    assert list(sketches.forgotten) == list(spreads.forgotten) == (["r0", "r1"] if count >= LEAST_ROWS else ["r0"])
    assert sketches.forgotten["r0"].count == spreads.forgotten["r0"]["2"].weight == 30
    assert sum(cell.count for cell in sketches.retained.values()) == 170 - count
    assert moments.count == 200 - (count if count < LEAST_ROWS else 0)


@few
@given(st.integers(0, 3 * LEAST_REFERENCE_ROWS), st.integers(0, 3 * LEAST_REFERENCE_ROWS))
@example(LEAST_REFERENCE_ROWS, LEAST_REFERENCE_ROWS - 1)
def test_a_class_with_few_retained_rows_is_told_together_with_the_others_or_not_at_all(many, others):
    x, y = _data()
    rows = [*range(0, 3 * many, 3), *range(1, 3 * others, 3)]  # of class 0 and of class 1
    cells = _sketch(x, y, _client(rows), _ask(_samples([299]))).retained
    enough = {label: n for label, n in ((0, many), (1, others)) if n >= LEAST_REFERENCE_ROWS}
    if not enough and many + others >= LEAST_REFERENCE_ROWS:
        enough = {EVERY_CLASS: many + others}
    assert {label: one.count for label, one in cells.items()} == enough


def test_of_a_large_cell_so_many_rows_are_read_always_the_same_ones():
    x, y = _data(3 * MOST_REFERENCE_ROWS + 600)
    question, client = _ask(_samples(range(30))), _client(range(len(x)))
    cells = question.retained(client, y)
    assert {len(rows) for rows in cells.values()} == {MOST_REFERENCE_ROWS}
    hidden = torch.ones(len(x), dtype=torch.bool)
    hidden[torch.cat([*cells.values(), torch.arange(30)])] = False
    expected, unread = _sketch(x, y, client, question), x.clone()
    unread[hidden] = torch.nan
    found = _sketch(unread, y, client, question)
    assert all(torch.equal(found.retained[label].sums, one.sums) for label, one in expected.retained.items())


def test_rows_of_others_and_rows_that_are_gone_are_never_read():
    x, y = _data()
    client = Client(0, torch.arange(0, 200), torch.arange(200, 210), torch.arange(210, 220))
    question = _ask(_samples(range(80)), gone=Forget.classes([1]) | _samples(range(80, 100)) | _samples([250], 3))
    expected = _all(x, y, client, question)
    hidden = torch.tensor([row >= 200 or 80 <= row < 100 or (row >= 80 and row % CLASSES == 1) for row in range(300)])
    x[hidden] = torch.nan
    found = _all(x, y, client, question)
    assert _same(found, expected) and found[2].count == 80 + int((~hidden[80:200]).sum())


@few
@given(seeds, st.integers(LEAST_ROWS, 60), st.integers(1, 3))
def test_means_variances_and_second_moments_are_those_of_the_rows(seed, count, batches):
    x, y = _data()
    order = torch.randperm(300, generator=_source(seed))
    rows, held = order[:count].sort().values, order[: 100 * batches].sort().values
    question = _ask(_samples(rows))
    cells = {label: held[~torch.isin(held, rows) & (y[held] == label)] for label in range(CLASSES)}
    weights = {label: (label + 1) / 6 for label, of in cells.items() if len(of) >= LEAST_REFERENCE_ROWS}
    spreads = _measure(x, y, _client(held), question, {"r0": weights})
    for cut in CUTS:
        own, reference = spreads.forgotten["r0"][cut], spreads.reference["r0"][cut]
        features, parts = _at(x, rows, cut), {label: _at(x, cells[label], cut) for label in weights}
        assert own.weight == count
        assert reference.weight == pytest.approx(sum(weights.values()))
        expected = {
            "own mean": (own.average.mean, features.mean(0)),
            "own variance": (own.average.variance, features.var(0, correction=0)),
            "mean": (reference.mean, sum(w * parts[label].mean(0) for label, w in weights.items())),
            "variance": (
                reference.variance,
                sum(w * parts[label].var(0, correction=0) for label, w in weights.items()),
            ),
        }
        for name, (told, true) in expected.items():
            torch.testing.assert_close(told[0].double(), true, atol=1e-3, rtol=1e-3, msg=f"{cut} {name}")
    read = torch.cat([rows, held[~torch.isin(held, rows)]]) if len(held) - count >= LEAST_ROWS else rows
    moments = _second(x, y, _client(held), question)
    features = _at(x, read)
    assert moments.count == len(read)
    torch.testing.assert_close(moments.sums[0], features.sum(0), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(moments.squares[0], features.T @ features, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("over", ["each", "tokens"])
def test_statistics_have_the_shape_of_what_the_filter_acts_on_and_of_the_positions_asked_for(over):
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(60, 1, 4, 4, generator=_source(0)), torch.zeros(60, dtype=torch.long)
    question, positions = _ask(_samples(range(25))), {"each": 16, "tokens": 1}[over]
    data = _held(x, y, _client(range(60)), model)
    whole = second_moments(data, "2", question, granularity=over, positions=range(positions))
    assert whole.squares.shape == (positions, 3, 3)
    assert whole.count == (35 * 16 if over == "tokens" else 60)  # for tokens what they are compared with alone
    if over == "each":
        some = second_moments(data, "2", question, granularity=over, positions=(2, 7))
        torch.testing.assert_close(some.squares, whole.squares[[2, 7]], atol=1e-4, rtol=1e-4)
    spreads = measure_groups(data, {"2": over}, question, {"r0": {0: 1.0}})
    assert spreads.forgotten["r0"]["2"].mean.shape == spreads.reference["r0"]["2"].mean.shape == (positions, 3)
    sketches = sketch_groups(data, "2", question, over)
    assert sketches.forgotten["r0"].sums.shape == shortened(torch.zeros(positions, 3)).shape


def test_clients_tell_of_the_side_that_they_hold_alone():
    x, y = _data()
    question = _ask(Forget.clients([0]))
    forgetting, others, empty = (
        _all(x, y, client, question.to(client.id))
        for client in (_client(range(100)), _client(range(100, 200), 1), _client([]))
    )
    assert (list(forgetting[0].forgotten), list(forgetting[0].retained)) == (["r0"], [])
    assert (list(others[0].forgotten), list(others[0].retained)) == ([], [0, 1, 2])
    assert not forgetting[1].reference
    assert not others[1].forgotten and others[1].reference["r0"]["2"].weight == pytest.approx(0.9)
    assert not (empty[0].forgotten or empty[0].retained or empty[1].forgotten or empty[1].reference or empty[2])


def test_second_moments_count_each_row_once_and_no_fewer_than_the_least_number_of_retained_ones():
    x, y = _data()
    for question, held, expected in (
        (_ask(Forget.clients([1])), 100, 100),
        (_ask(_samples(range(30)), _samples(range(100, 130), 1)), 100, 100),
        (_ask(_samples(range(30)), _samples(range(5, 40))), 100, 100),
        (_ask(_samples(range(30))), 31, 30),  # the one retained row is not told
    ):
        found = _second(x, y, _client(range(held)), question.to(0))
        assert found.count == expected
        torch.testing.assert_close(found.sums[0], _at(x, range(expected)).sum(0), atol=1e-3, rtol=1e-4)
    assert _second(x, y, _client(range(3)), _ask(Forget.clients([1]))) is None
