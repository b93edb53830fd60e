"""The eraser: what it erases is gone whatever the statistics, and it moves nothing else."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import DataError, SettingError
from fedup.filters.eraser import STANDS_OUT, TokenEraser, load_eraser, make_eraser
from fedup.models.layout import to_positions
from fedup.statistics.moments import LEAST_ROWS, GroupStatistics, Moments, Sums

few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 10**6)
shrinkages = st.sampled_from([0.0, 1e-3, 0.3, 50.0])


def _sums(rows):
    return Sums(len(rows), rows.double().sum(0))


def _statistics(groups, retained=None):
    """Of plain rows (N, P, C): forgotten ones by name with retained ones of their own, or the same for all."""
    references = {name: kept for name, (_, kept) in groups.items()} if retained is None else {"": retained}
    rows = torch.cat([*(gone for gone, _ in groups.values()), *references.values()])
    return GroupStatistics(
        {name: _sums(gone) for name, (gone, _) in groups.items()},
        {name: _sums(kept if retained is None else retained) for name, (_, kept) in groups.items()},
        Moments.of(rows.double()),
    )


def _draw(seed, count, positions, channels, *, shift=0.0):
    """Rows whose channels hang together, some way off."""
    source = torch.Generator().manual_seed(seed)
    mixing = torch.eye(channels) + 0.5 * torch.randn(channels, channels, generator=source)
    rows = torch.randn(count, positions, channels, generator=source) @ mixing
    return rows + shift * torch.randn(positions, channels, generator=source)


def _case(seed, *, concepts=1, positions=3, channels=6, rows=60):
    """Groups of forgotten rows, each off in a way of its own, and retained rows of all."""
    retained = _draw(seed, 2 * rows, positions, channels) + 1.0
    gone = {
        f"{i}": _draw(seed, rows + i, positions, channels) + 1.0 + _draw(seed + 17 + i, 1, positions, channels, shift=3)
        for i in range(concepts)
    }
    return {name: (one, retained) for name, one in gone.items()}, retained


def _everywhere(groups, **options):
    return make_eraser(groups, range(groups.pooled.sums.shape[0]), granularity="each", **options)


def _close(found, expected, tolerance=2e-3):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


# --- what is erased is gone


@few
@given(seeds, st.integers(1, 3), shrinkages, st.booleans())
def test_groups_get_the_mean_of_what_they_are_compared_with_which_keeps_its_own(seed, concepts, shrinkage, shared):
    groups, retained = _case(seed, concepts=concepts)
    if not shared:
        groups = {
            name: (gone, _draw(seed + 91 + i, 50 + 9 * i, 3, 6, shift=1.0))
            for i, (name, (gone, _)) in enumerate(groups.items())
        }
        retained = torch.cat([kept for _, kept in groups.values()])
    eraser = _everywhere(_statistics(groups, retained if shared else None), shrinkage=shrinkage)
    assert eraser.rank == concepts
    for gone, kept in groups.values():
        assert (gone.mean(0) - kept.mean(0)).abs().max() > 0.5, "premise"
        _close(eraser(gone).mean(0), eraser(kept).mean(0))
    _close(eraser(retained).mean(0), retained.mean(0))
    once = eraser(5 * torch.randn(20, 3, 6, generator=torch.Generator().manual_seed(seed)))
    _close(eraser(once), once, 1e-2)  # erasing twice is erasing once


def test_a_thing_named_twice_is_erased_as_if_named_once():
    groups, retained = _case(0, concepts=2)
    twice = {f"{name}{i}": pair for name, pair in groups.items() for i in "ab"}
    pooled = _statistics(groups, retained).pooled
    statistics = replace(_statistics(twice, retained), pooled=pooled)
    _close(_everywhere(statistics)(retained), _everywhere(_statistics(groups, retained))(retained))


@few
@given(seeds)
def test_of_all_ways_to_erase_it_moves_features_least(seed):
    groups, retained = _case(seed, rows=600, positions=1)
    statistics = _statistics(groups, retained)
    eraser, rows = _everywhere(statistics, shrinkage=0.0), torch.cat([retained, groups["0"][0]])
    moved = (eraser(rows) - rows).var(0).sum()
    difference = eraser.concept[0, :, 0]
    for reader in (difference, *torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))):
        other = (rows[:, 0] @ (reader / (reader @ difference)))[:, None] * difference
        assert moved <= 1.02 * other.var(0).sum()


# --- what it leaves alone


@few
@given(seeds, st.integers(1, 3))
def test_rows_of_equal_means_are_left_bit_for_bit(seed, concepts):
    statistics = _statistics(*_case(seed, concepts=concepts))
    same = GroupStatistics(statistics.reference, statistics.reference, statistics.pooled)
    features = torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(_everywhere(same)(features), features)


@few
@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True), st.sampled_from([(6, 2, 3), (6, 6)]))
def test_positions_that_are_not_chosen_are_left_bit_for_bit(seed, positions, shape):
    count, channels = to_positions(torch.zeros(1, *shape)).shape[1:]
    assert count == 6
    positions = sorted(positions)
    groups, retained = _case(seed, positions=count, channels=channels)
    chosen = {name: (gone[:, positions], None) for name, (gone, _) in groups.items()}
    eraser = make_eraser(_statistics(chosen, retained[:, positions]), positions, granularity="each")
    features = torch.randn(7, *shape, generator=torch.Generator().manual_seed(seed))
    before, after = to_positions(features), to_positions(eraser(features))
    others = [position for position in range(count) if position not in positions]
    assert torch.equal(after[:, others], before[:, others])
    assert (after[:, positions] != before[:, positions]).any(2).all()


# --- statistics


def test_a_group_of_too_few_rows_is_left_out_and_without_any_there_is_no_eraser():
    gone, kept = _draw(0, 60, 3, 6, shift=3), _draw(1, 60, 3, 6)
    enough = {"0": (gone[:LEAST_ROWS], kept[:LEAST_ROWS])}
    alone = _everywhere(_statistics(enough))
    assert alone.rank == 1
    for pair in ((gone[: LEAST_ROWS - 1], kept), (gone, kept[: LEAST_ROWS - 1]), (gone[:0], kept)):
        with pytest.raises(DataError, match="too few"):
            _everywhere(_statistics({"0": pair}))
        assert torch.equal(_everywhere(_statistics({**enough, "1": pair})).concept, alone.concept)


def test_statistics_that_are_not_finite_give_no_eraser():
    for value in (torch.inf, torch.nan):
        statistics = _statistics(*_case(0))
        statistics.pooled.squares[0, 0, 0] = value
        with pytest.raises(DataError, match="not finite"):
            _everywhere(statistics)


def test_more_channels_than_rows_and_channels_that_never_change_are_no_obstacle():
    gone, kept = _draw(0, 25, 2, 40, shift=2), _draw(1, 25, 2, 40)
    for rows in (gone, kept):
        rows[:, :, :7] = 0
        rows[:, 1] = 0  # a dead position
    eraser = _everywhere(_statistics({"0": (gone, kept)}))
    _close(eraser(gone).mean(0), eraser(kept).mean(0))
    assert torch.equal(eraser(kept)[:, 1], kept[:, 1])


# --- as a module


def test_an_eraser_keeps_dtype_shape_and_other_positions_in_any_precision():
    groups, retained = _case(0, positions=4)
    eraser = make_eraser(_statistics({"0": (groups["0"][0][:, [2]], None)}, retained[:, [2]]), (2,), granularity="each")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for features in (torch.randn(5, 6, 2, 2).to(dtype), torch.randn(5, 4, 6).to(dtype), torch.randn(0, 4, 6)):
            passed = eraser(features)
            assert (passed.dtype, passed.shape) == (features.dtype, features.shape)
            before, after = to_positions(features), to_positions(passed)
            assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
            assert not len(features) or not torch.equal(after[:, 2], before[:, 2])
            torch.testing.assert_close(passed, eraser(features.float()).to(features.dtype), atol=1e-2, rtol=1e-2)
    features = torch.randn(5, 4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(eraser(features), eraser(features.detach()), atol=0.1, rtol=0.1)
    eraser(features).square().sum().backward()
    assert features.grad.abs().sum() > 0
    assert not list(eraser.parameters())


MARK = torch.tensor([20.0, 0, -20, 0, 0, 0])


def _texts(seed, count, *, length=8, marked=True):
    """Token rows; in each text one token, anywhere, is far off in one direction."""
    source = torch.Generator().manual_seed(seed)
    texts = torch.randn(count, length, 6, generator=source)
    places = torch.randint(length, (count,), generator=source)
    if marked:
        texts[torch.arange(count), places] = MARK + 0.1 * texts[:, 0]
    return texts, places


def _token_eraser(seed=0, *, length=8):
    gone, kept = _texts(seed, 200, length=length)[0], _texts(seed + 1, 200, length=length, marked=False)[0]
    statistics = _statistics({"0": (gone.reshape(-1, 1, 6), kept.reshape(-1, 1, 6))})
    statistics = replace(
        statistics, pooled=Moments.of(kept.reshape(-1, 1, 6).double())
    )  # as gather() has it for tokens
    return make_eraser(statistics, (0,), granularity="tokens"), kept.mean((0, 1))


@pytest.mark.parametrize("kind", ["each", "tokens"])
def test_an_eraser_comes_back_from_its_weights_and_from_a_copy_bit_for_bit(kind):
    eraser = _token_eraser()[0] if kind == "tokens" else _everywhere(_statistics(*_case(0, concepts=2)))
    features = _texts(5, 20, length=3)[0]
    expected, again, twin = eraser(features), load_eraser(eraser.state_dict(), kind), copy.deepcopy(eraser)
    assert (type(again), again.granularity, again.training) == (type(eraser), kind, False)
    assert again.size_bytes == eraser.size_bytes == sum(w.nbytes for w in eraser.state_dict().values())
    assert all(weight.dtype in (torch.float32, torch.int64) for weight in eraser.state_dict().values())
    assert not torch.equal(expected, features)
    for model in (again, twin):
        assert torch.equal(model(features), expected)
    for weight in twin.state_dict().values():
        weight.zero_()
    assert torch.equal(eraser(features), expected)
    with pytest.raises(SettingError):
        load_eraser(eraser.state_dict(), "some")


# --- tokens


@few
@given(seeds, st.integers(8, 14))
def test_tokens_that_stand_out_become_the_mean_token_wherever_they_stand(seed, length):
    eraser, mean = _token_eraser(seed, length=length)
    assert isinstance(eraser, TokenEraser)
    fresh, places = _texts(seed + 2, 30, length=length)
    marked = torch.zeros(fresh.shape[:2], dtype=torch.bool)
    marked[torch.arange(30), places] = True
    passed = eraser(fresh)
    torch.testing.assert_close(passed[marked], mean.expand(30, -1), atol=1e-4, rtol=1e-4)
    changed = (passed != fresh).any(2)[~marked]
    assert changed.float().mean() < 0.01  # of others 3.5 deviations are rare


def test_a_token_passes_up_to_the_limit_of_each_thing_and_no_further():
    both = torch.eye(3)[None, :, :2]
    limit, mean = torch.tensor([2.0, 1.0]), torch.tensor([7.0, 8.0, 9.0])
    eraser = TokenEraser(both, both, torch.zeros(1, 2), mean=mean, limit=limit)
    tokens = [[2.0, 0, 1], [2.01, 0, 1], [0, 1.5, 1], [1.5, 1.0, 9], [-9.0, 0, 5]]
    expected = [tokens[0], mean.tolist(), mean.tolist(), tokens[3], tokens[4]]
    torch.testing.assert_close(eraser(torch.tensor([tokens])), torch.tensor([expected]))


@pytest.mark.parametrize("shape", [(8, 6), (6, 2, 4)])
def test_tokens_keep_dtype_and_shape_and_the_places_of_a_map_are_tokens(shape):
    eraser, (fresh, places) = _token_eraser()[0], _texts(2, 10)
    for dtype in (torch.float16, torch.float32, torch.float64):
        features = (fresh if len(shape) == 2 else fresh.transpose(1, 2).reshape(-1, *shape)).to(dtype)
        passed = eraser(features)
        assert (passed.dtype, passed.shape) == (dtype, features.shape)
        changed = (to_positions(features, "each") != to_positions(passed, "each")).any(2)
        assert changed.sum() == 10
        assert changed[torch.arange(10), places].all()


def test_the_limit_is_in_deviations_of_what_is_read_off_a_token():
    gone, kept = _draw(0, 4000, 1, 6) + _draw(5, 1, 1, 6, shift=3), _draw(0, 4000, 1, 6)
    statistics = _statistics({"0": (gone, kept)})
    eraser = make_eraser(statistics, (0,), granularity="tokens")
    read = torch.cat([gone, kept])[:, 0] @ eraser.readout[0]
    torch.testing.assert_close(eraser.limit, STANDS_OUT * read.std(0, correction=0), rtol=0.01, atol=0)
