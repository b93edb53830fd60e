"""What clients tell of their rows: it adds up, is about enough rows, and about nothing else."""

import numpy as np
import pytest
import torch
from fedup.contrast import Question, gather, measure_shifts, mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedup import Forget
from fedup.cut import read_features
from fedup.federation import Client
from fedup.moments import LEAST_ROWS, Contrast, Moments, Shift, Sums

few = settings(max_examples=25, deadline=None, derandomize=True)
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


def _gather(x, y, client, question, **options):
    return gather(MODEL, "2", x, y, client, question, **{"over": "each", "positions": (0,), **options})


def _shifts(x, y, client, question):
    return measure_shifts(MODEL, CUTS, x, y, client, question)


def _at(x, rows, cut="2"):
    return read_features(MODEL, cut, x, torch.as_tensor(rows)).values.double()


def _ask(*requests, gone=None, **options):
    named = {f"r{i}": request for i, request in enumerate(requests)}
    joined = gone or Forget()
    for request in requests:
        joined = joined | request
    return Question(named, joined, **options)


def _samples(rows, client=0):
    return Forget.samples({client: [int(row) for row in rows]})


# --- moments and sums


@few
@given(seeds, st.integers(1, 40), st.lists(st.integers(0, 40), max_size=4), st.booleans())
def test_moments_of_parts_added_up_are_those_of_all_rows(seed, count, edges, diagonal):
    rows = torch.randn(count, 3, 4, generator=_source(seed))
    parts = [Moments.of(part, diagonal=diagonal) for part in rows.tensor_split(sorted(edges))]
    added, whole = sum(parts[1:], start=parts[0]), Moments.of(rows, diagonal=diagonal)
    assert added.count == whole.count == count
    for name in ("sums", "squares", "mean", "variance"):
        torch.testing.assert_close(getattr(added, name), getattr(whole, name), atol=1e-5, rtol=1e-5)
    if not diagonal:
        torch.testing.assert_close(added.covariance, whole.covariance, atol=1e-5, rtol=1e-5)


@few
@given(seeds, st.integers(2, 60), st.floats(-20, 20))
def test_mean_covariance_and_variance_are_those_of_numpy(seed, count, offset):
    rows = torch.randn(count, 2, 4, generator=_source(seed)) * torch.tensor([0.1, 1, 2, 5]) + offset
    full, diagonal = Moments.of(rows), Moments.of(rows, diagonal=True)
    for position in range(2):
        here = rows[:, position].double().numpy()
        expected = torch.from_numpy(np.cov(here.T, bias=True))
        torch.testing.assert_close(full.mean[position], torch.from_numpy(here.mean(0)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(full.covariance[position], expected, atol=2e-3, rtol=1e-3)
        for moments in (full, diagonal):
            torch.testing.assert_close(moments.variance[position], expected.diagonal(), atol=2e-3, rtol=1e-3)


def test_a_variance_is_never_negative_and_nothing_has_no_moments():
    assert Moments.of(torch.full((7, 2, 3), 1000.1), diagonal=True).variance.min() >= 0
    nothing = Moments(0, torch.zeros(2, 3), torch.zeros(2, 3, 3))
    assert nothing.mean.abs().max() == nothing.variance.abs().max() == nothing.covariance.abs().max() == 0
    assert Sums(0, torch.zeros(2, 3)).mean.abs().max() == 0


def test_sums_are_kept_in_double_precision():
    assert Moments.of(torch.randn(3, 2, 4)).squares.dtype == torch.float64
    assert Moments.of(torch.randn(3, 2, 4)).sums.dtype == torch.float64


@few
@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_shifts_add_up_field_by_field(seed, one, other):
    parts = [torch.rand(4, 6, generator=_source(seed + i)) for i in range(2)]
    added = Shift(one, *parts[0]) + Shift(other, *parts[1])
    assert added.rows == one + other
    for i, name in enumerate(("distance", "noise", "fisher", "variance")):
        assert torch.equal(getattr(added, name), parts[0][i] + parts[1][i])


def test_a_shift_is_a_small_message_even_for_large_maps():
    shift = Shift(1000, *torch.rand(4, 32 * 32))
    assert 4 * 4 * 1024 < shift.size_bytes < 100_000


def test_a_contrast_adds_up_group_by_group_and_is_as_large_as_what_it_says():
    def one(names, count):
        sums = {name: Sums(count, torch.ones(2, 5)) for name in names}
        return Contrast(sums, sums, Moments.of(torch.randn(count, 2, 5)))

    added = one("ab", 20) + one("bc", 30)
    assert {name: sums.count for name, sums in added.forgotten.items()} == {"a": 20, "b": 50, "c": 30}
    assert {name: float(sums.sums.sum()) for name, sums in added.reference.items()} == {"a": 10, "b": 20, "c": 10}
    assert added.pooled.count == 50
    numbers = 2 * (5 + 15) + 6 * 10  # sums and halves of matrices at both positions; three groups, two sums each
    assert 4 * numbers < added.size_bytes < 4 * numbers + 2000


# --- mixtures


@few
@given(seeds, st.integers(1, 8), st.floats(1e-3, 1e3))
def test_weights_of_a_mixture_are_shares(seed, many, scale):
    references = list(scale * torch.randn(many, 2, 6, generator=_source(seed)).double())
    weights = mixture(scale * torch.randn(2, 6, generator=_source(seed + 1)).double(), references)
    assert weights.shape == (many,)
    assert weights.min() >= 0
    assert float(weights.sum()) == pytest.approx(1)


@few
@given(seeds, st.integers(1, 8))
def test_a_known_mixture_is_found_again(seed, many):
    references = torch.randn(many, 3, 10, generator=_source(seed)).double()
    weights = torch.rand(many, generator=_source(seed + 1)).double()
    weights[: many // 2] = 0
    weights /= weights.sum()
    found = mixture(torch.einsum("k,k...->...", weights, references), list(references))
    torch.testing.assert_close(found, weights, atol=1e-3, rtol=0)


@few
@given(seeds, st.integers(1, 8), st.integers(0, 7))
def test_a_mean_that_is_one_of_the_references_is_that_one_alone(seed, many, which):
    references = torch.randn(many, 3, 10, generator=_source(seed)).double()
    expected = torch.zeros(many).double()
    expected[which % many] = 1
    found = mixture(references[which % many], list(references))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@few
@given(seeds, st.integers(2, 6))
def test_no_other_mixture_comes_closer(seed, many):
    references = torch.randn(many, 2, 4, generator=_source(seed)).double()
    mean = 2 * torch.randn(2, 4, generator=_source(seed + 1)).double()
    others = torch.distributions.Dirichlet(torch.full((many,), 0.3).double()).sample((500,))

    def far(weights):
        return (torch.einsum("nk,kpc->npc", weights, references) - mean).square().sum((1, 2))

    assert far(mixture(mean, list(references))[None])[0] <= far(others).min() + 1e-4


def test_references_that_are_all_the_same_are_no_obstacle():
    same = torch.ones(2, 3).double()
    assert mixture(same, [same] * 3).sum() == pytest.approx(1)
    assert mixture(same + 1, [same] * 3).sum() == pytest.approx(1)


# --- questions


def test_a_client_is_told_nothing_of_other_clients_samples():
    first, second = (
        Forget.samples({0: [1, 2], 1: [101, 102]}),
        Forget.samples({1: [103], 2: [201]}) | Forget.classes([2]),
    )
    question = _ask(first, second, gone=Forget.samples({2: [999], 0: [3]}), by_class=True)
    told = question.to(0)
    assert list(told.requests) == list(question.requests)
    assert told.by_class
    assert told.requests["r0"] == Forget.samples({0: [1, 2]})
    assert told.requests["r1"] == Forget.classes([2])
    assert told.gone == Forget.samples({0: [1, 2, 3]}) | Forget.classes([2])
    assert told.to_json()["gone"]["samples"] == {"0": [1, 2, 3]}
    assert not any(number in str(told.to_json()) for number in ("101", "102", "103", "201", "999"))


@few
@given(seeds, st.booleans())
def test_a_client_answers_its_part_of_a_question_like_the_whole(seed, by_class):
    x, y = _data()
    rows = torch.randperm(100, generator=_source(seed))[:70]
    question = _ask(_samples(rows) | _samples([150], 1), gone=_samples([160], 1), by_class=by_class)
    whole, part = _gather(x, y, _client(range(100)), question), _gather(x, y, _client(range(100)), question.to(0))
    assert list(whole.forgotten) == list(part.forgotten)
    assert torch.equal(whole.pooled.squares, part.pooled.squares)


def test_forgotten_and_retained_rows_of_a_group_are_those_that_the_requests_say():
    _, y = _data()
    question = _ask(_samples(range(30)), gone=Forget.classes([1]) | _samples(range(30, 40)))
    ((rows, kept),) = question.groups(_client(range(100)), y).values()
    assert rows.tolist() == list(range(30))
    assert kept.tolist() == [row for row in range(40, 100) if row % CLASSES != 1]


def test_by_class_each_class_is_compared_with_its_own_where_that_has_enough_rows():
    _, y = _data()
    held = [row for row in range(200) if row % CLASSES != 2 or row < 100]
    question = _ask(_samples(row for row in held if row < 100), by_class=True)
    groups = question.groups(_client(held), y)
    kept = [row for row in held if row >= 100]
    assert sorted(groups) == ["r0:0", "r0:1", "r0:2"]
    for label in range(CLASSES):
        rows, compared = groups[f"r0:{label}"]
        assert rows.tolist() == [row for row in range(100) if row % CLASSES == label]
        own = [row for row in kept if row % CLASSES == label]
        assert compared.tolist() == (own if label != 2 else kept)
        assert bool(own) == (label != 2)


@few
@given(st.integers(0, 2 * LEAST_ROWS), st.booleans())
def test_nothing_is_told_of_fewer_than_the_least_number_of_forgotten_rows(count, by_class):
    x, y = _data()
    y = torch.zeros_like(y)
    client, question = _client(range(200)), _ask(_samples(range(count)) if count else Forget(), by_class=by_class)
    if count:
        x[:count] = x[:count] if count >= LEAST_ROWS else torch.nan  # so they are not even read
        assert (_gather(x, y, client, question) is not None) == (count >= LEAST_ROWS)
    assert set(_shifts(x, y, client, question)) == (set(CUTS) if count >= LEAST_ROWS else set())


def test_a_group_of_few_rows_is_left_out_and_its_rows_are_in_no_sum():
    x, y = _data()
    large, small = range(30), range(30, 30 + LEAST_ROWS - 1)
    x[list(small)] = torch.nan
    question = _ask(_samples(large), _samples(small))
    found = _gather(x, y, _client(range(200)), question)
    assert list(found.forgotten) == list(found.reference) == ["r0"]
    assert found.forgotten["r0"].count == 30
    assert found.pooled.count == 200 - len(small)
    assert set(_shifts(x, y, _client(range(200)), question)) == set(CUTS)


def test_by_class_classes_of_few_rows_are_left_out():
    x, y = _data()
    rows = [row for row in range(90) if row % CLASSES == 0] + [1, 4, 7]
    found = _gather(x, y, _client(range(300)), _ask(_samples(rows), by_class=True))
    assert list(found.forgotten) == ["r0:0"]
    assert found.forgotten["r0:0"].count == 30


def test_shifts_need_enough_retained_rows_too():
    x, y = _data()
    for count, told in ((LEAST_ROWS - 1, False), (LEAST_ROWS, True)):
        found = _shifts(x, y, _client(range(50 + count)), _ask(_samples(range(50))))
        assert bool(found) == told


# --- what is read


@pytest.mark.parametrize("by_class", [False, True])
def test_rows_of_others_and_rows_that_are_gone_are_never_read(by_class):
    x, y = _data()
    client = Client(0, torch.arange(0, 200), torch.arange(200, 210), torch.arange(210, 220))
    question = _ask(
        _samples(range(80)), gone=Forget.classes([1]) | _samples(range(80, 100)) | _samples([250], 3), by_class=by_class
    )
    expected = _gather(x, y, client, question), _shifts(x, y, client, question)
    hidden = torch.tensor([row >= 200 or 80 <= row < 100 or (row >= 80 and row % CLASSES == 1) for row in range(300)])
    x[hidden] = torch.nan
    found = _gather(x, y, client, question), _shifts(x, y, client, question)
    assert torch.equal(found[0].pooled.squares, expected[0].pooled.squares)
    assert found[0].pooled.count == 80 + int((~hidden[80:200]).sum())
    for name, sums in expected[0].reference.items():
        assert torch.equal(found[0].reference[name].sums, sums.sums)
    for cut, shift in expected[1].items():
        assert torch.equal(found[1][cut].distance, shift.distance)


def test_premise_rows_that_are_read_do_fail_when_they_are_nan():
    x, y = _data()
    x[150] = torch.nan
    for ask in (_gather, _shifts):
        with pytest.raises(ValueError, match="NaN"):
            ask(x, y, _client(range(200)), _ask(_samples(range(80))))


@few
@given(seeds, st.integers(LEAST_ROWS, 60), st.integers(1, 3))
def test_sums_and_second_moments_are_those_of_the_rows(seed, count, batches):
    x, y = _data()
    order = torch.randperm(300, generator=_source(seed))
    rows, held = order[:count].sort().values, order[: 100 * batches].sort().values
    found = _gather(x, y, _client(held), _ask(_samples(rows)))
    torch.testing.assert_close(found.forgotten["r0"].sums[0], _at(x, rows).sum(0), atol=1e-3, rtol=1e-4)
    assert found.forgotten["r0"].count == found.reference["r0"].count == count
    kept = held[~torch.isin(held, rows)]
    parts = [kept[y[kept] == label] for label in range(CLASSES)]
    read = torch.cat([rows, *([p for p in parts if len(p) >= LEAST_ROWS] or [kept])])
    features = _at(x, read)
    assert found.pooled.count == len(read)
    torch.testing.assert_close(found.pooled.sums[0], features.sum(0), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.pooled.squares[0], features.T @ features, atol=1e-2, rtol=1e-4)


def test_rows_are_compared_with_retained_ones_of_the_same_content_whatever_their_label():
    x, y = _data()
    rows = torch.arange(0, 90, 3)
    x[rows] = x[torch.arange(200, 290, 3)]  # of class 2, labelled 0
    kept = torch.arange(91, 300)
    found = _gather(x, y, _client(torch.cat([rows, kept])), _ask(_samples(rows)))
    early = torch.stack([_at(x, kept[y[kept] == label]).mean(0) for label in range(CLASSES)])
    expected = mixture(_at(x, rows).mean(0), list(early)) @ early
    torch.testing.assert_close(found.reference["r0"].mean[0], expected, atol=1e-4, rtol=1e-4)
    own, all_of_them = early[2], _at(x, kept).mean(0)
    assert (expected - own).norm() < 0.3 * (expected - all_of_them).norm()


def test_the_mixture_is_chosen_at_the_earliest_cut_and_used_at_the_one_in_question():
    x, y = _data()
    rows, kept = torch.arange(0, 60), torch.arange(60, 300)
    found = _gather(x, y, _client(range(300)), _ask(_samples(rows)))
    later = gather(MODEL, "4", x, y, _client(range(300)), _ask(_samples(rows)), over="each", positions=(0,))
    parts = [kept[y[kept] == label] for label in range(CLASSES)]
    weights = mixture(_at(x, rows).mean(0), [_at(x, part).mean(0) for part in parts])
    for contrast, cut in ((found, "2"), (later, "4")):
        expected = weights @ torch.stack([_at(x, part, cut).mean(0) for part in parts])
        torch.testing.assert_close(contrast.reference["r0"].mean[0], expected, atol=1e-4, rtol=1e-4)


def test_only_the_positions_that_are_asked_for_are_told():
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(60, 1, 4, 4, generator=_source(0)), torch.zeros(60, dtype=torch.long)
    ask = {"question": _ask(_samples(range(25))), "over": "each"}
    some = gather(model, "2", x, y, _client(range(60)), positions=(2, 7), **ask)
    whole = gather(model, "2", x, y, _client(range(60)), positions=range(16), **ask)
    assert some.pooled.squares.shape == (2, 3, 3)
    torch.testing.assert_close(some.pooled.sums, whole.pooled.sums[[2, 7]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(some.forgotten["r0"].sums, whole.forgotten["r0"].sums[[2, 7]], atol=1e-5, rtol=1e-5)
    assert some.size_bytes < whole.size_bytes


@pytest.mark.parametrize("over", ["each", "all", "tokens"])
def test_statistics_have_the_shape_of_what_the_filter_acts_on(over):
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(60, 1, 4, 4, generator=_source(0)), torch.zeros(60, dtype=torch.long)
    question, positions = _ask(_samples(range(25))), {"each": 16, "all": 1, "tokens": 1}[over]
    found = gather(model, "2", x, y, _client(range(60)), question, over=over, positions=range(positions))
    width = 48 if over == "all" else 3
    assert found.pooled.squares.shape == (positions, width, width)
    assert found.pooled.count == (35 * 16 if over == "tokens" else 60)  # for tokens what they are compared with alone
    shift = measure_shifts(model, {"2": over}, x, y, _client(range(60)), question)["2"]
    assert shift.distance.shape == (positions,)


# --- clients that hold only one side


def test_clients_that_hold_one_side_only_tell_that_side():
    x, y = _data()
    question = _ask(Forget.clients([0]))
    forgetting, others = (_gather(x, y, _client(range(i * 100, i * 100 + 100), i), question.to(i)) for i in (0, 1))
    assert (forgetting.forgotten["r0"].count, forgetting.reference["r0"].count) == (100, 0)
    assert (others.forgotten["r0"].count, others.reference["r0"].count) == (0, 100)
    torch.testing.assert_close(others.reference["r0"].sums[0], _at(x, range(100, 200)).sum(0), atol=1e-3, rtol=1e-4)
    assert forgetting.forgotten["r0"].sums.shape == others.forgotten["r0"].sums.shape
    both = forgetting + others
    assert both.forgotten["r0"].count == both.reference["r0"].count == 100
    assert _shifts(x, y, _client(range(100)), question) == {}


def test_a_client_without_rows_tells_nothing():
    x, y = _data()
    assert _gather(x, y, _client([]), _ask(Forget.clients([0]))) is None


@pytest.mark.parametrize("case", ["a whole client goes", "samples of two clients go"])
def test_no_row_is_counted_twice_in_second_moments(case):
    x, y = _data()
    first = Forget.clients([1]) if case == "a whole client goes" else _samples(range(30))
    question = _ask(first) if case == "a whole client goes" else _ask(first, _samples(range(100, 130), 1))
    found = _gather(x, y, _client(range(100)), question.to(0))
    assert found.pooled.count == 100
    torch.testing.assert_close(found.pooled.sums[0], _at(x, range(100)).sum(0), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", ["no forgotten rows", "one retained row"])
def test_nothing_can_be_told_of_fewer_than_the_least_number_of_retained_rows(case):
    x, y = _data()
    if case == "no forgotten rows":
        assert _gather(x, y, _client(range(3)), _ask(Forget.clients([1]))) is None
    else:
        found = _gather(x, y, _client(range(31)), _ask(_samples(range(30))))
        alone = found.pooled.sums[0] - found.forgotten["r0"].sums[0]
        assert not torch.allclose(alone, _at(x, [30])[0], atol=1e-3)


# --- shifts


def test_a_shift_is_where_it_was_planted_and_large_beside_noise():
    x, y = _data()
    model = nn.Sequential(
        nn.Flatten(), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 1), nn.Conv2d(3, 2, 1), nn.Flatten()
    )
    model.append(nn.Linear(32, 3))
    x = torch.randn(300, 16, generator=_source(0))
    clean = measure_shifts(model, {"3": "each"}, x, y, _client(range(300)), _ask(_samples(range(60))))["3"]
    x[:60, 5] += 4
    found = measure_shifts(model, {"3": "each"}, x, y, _client(range(300)), _ask(_samples(range(60))))["3"]
    assert found.rows == 60
    assert found.distance.argmax() == found.fisher.argmax() == 5
    others = [position for position in range(16) if position != 5]
    assert found.distance[5] > 20 * found.distance[others].max()
    assert found.distance.sum() > 20 * found.noise.sum()
    assert 0.3 < clean.distance.sum() / clean.noise.sum() < 2.5


def test_a_shift_is_that_of_the_means_times_the_rows():
    x, y = _data()
    y = torch.zeros_like(y)
    x[:50] += 1
    found = _shifts(x, y, _client(range(300)), _ask(_samples(range(50))))["2"]
    gone, kept = _at(x, range(50)), _at(x, range(50, 300))
    within = (gone.var(0, correction=0) * 50 + kept.var(0, correction=0) * 250) / 300
    distance = (gone.mean(0) - kept.mean(0)).square()
    expected = {
        "distance": distance.sum(),
        "noise": (within * (1 / 50 + 1 / 250)).sum(),
        "fisher": (distance / (within + 0.01 * within.mean())).sum(),
        "variance": within.sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name), 50 * value[None].float(), atol=1e-3, rtol=1e-3)


def test_noise_is_that_of_the_mixture_that_rows_are_compared_with():
    x, y = _data()
    found = _shifts(x, y, _client(range(300)), _ask(_samples(range(60))))["2"]
    gone, parts = _at(x, range(60)), [_at(x, [r for r in range(60, 300) if r % CLASSES == k]) for k in range(CLASSES)]
    weights = mixture(gone.mean(0), [part.mean(0) for part in parts])
    assert weights.min() > 0.2, "premise: no class is left out"
    within = sum(len(part) * part.var(0, correction=0) for part in (gone, *parts)) / 300
    expected = 60 * within.sum() * (1 / 60 + sum(weights.square()) / 80)
    torch.testing.assert_close(found.noise, expected[None].float(), atol=1e-3, rtol=1e-3)
