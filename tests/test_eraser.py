"""The eraser: what it erases is gone whatever the statistics, and it moves nothing else."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.errors import DataError, SettingError
from fedup.filters.eraser import STANDS_OUT, Eraser, TokenEraser, load_eraser, make_eraser
from fedup.models.layout import to_positions
from fedup.statistics.moments import LEAST_ROWS, GroupStatistics, Moments, Sums

few = settings(max_examples=25, deadline=None, derandomize=True)
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
@given(seeds, st.integers(1, 3), shrinkages)
def test_no_channel_of_the_output_tells_forgotten_from_retained_rows(seed, concepts, shrinkage):
    groups, retained = _case(seed, concepts=concepts)
    eraser = _everywhere(_statistics(groups, retained), shrinkage=shrinkage)
    assert eraser.rank == concepts
    rows = torch.cat([retained, *(gone for gone, _ in groups.values())])
    passed, at = eraser(rows), len(retained)
    for gone, _ in groups.values():
        told = torch.zeros(len(rows))
        told[at : at + len(gone)] = 1
        at += len(gone)
        before, after = (
            torch.einsum("n,npc->pc", told - told.mean(), spread) / told.sum() for spread in (rows, passed)
        )
        assert before.abs().max() > 0.5, "premise"
        _close(after, torch.zeros_like(after))
        _close(eraser(gone).mean(0), eraser(retained).mean(0))


@few
@given(seeds, st.integers(1, 3), shrinkages)
def test_each_group_gets_the_mean_of_what_it_is_compared_with(seed, concepts, shrinkage):
    groups, _ = _case(seed, concepts=concepts)
    groups = {
        name: (gone, _draw(seed + 91 + i, 50 + i, 3, 6, shift=1.0))
        for i, (name, (gone, _)) in enumerate(groups.items())
    }
    eraser = _everywhere(_statistics(groups), shrinkage=shrinkage)
    for gone, kept in groups.values():
        _close(eraser(gone).mean(0), eraser(kept).mean(0))


@few
@given(seeds, st.integers(1, 3), shrinkages)
def test_retained_rows_keep_their_mean(seed, concepts, shrinkage):
    groups, retained = _case(seed, concepts=concepts)
    eraser = _everywhere(_statistics(groups, retained), shrinkage=shrinkage)
    _close(eraser(retained).mean(0), retained.mean(0))


def test_retained_rows_of_several_groups_keep_their_mean_over_all_of_them():
    groups, _ = _case(0, concepts=2)
    groups = {name: (gone, _draw(i, 50 + 30 * i, 3, 6, shift=2)) for i, (name, (gone, _)) in enumerate(groups.items())}
    kept = torch.cat([kept for _, kept in groups.values()])
    _close(_everywhere(_statistics(groups))(kept).mean(0), kept.mean(0))


@few
@given(seeds, st.integers(1, 3))
def test_erasing_twice_is_erasing_once(seed, concepts):
    groups, retained = _case(seed, concepts=concepts)
    eraser = _everywhere(_statistics(groups, retained))
    once = eraser(5 * torch.randn(20, 3, 6, generator=torch.Generator().manual_seed(seed)))
    _close(eraser(once), once, 1e-2)


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


@few
@given(seeds, st.integers(1, 3))
def test_a_thing_named_twice_is_erased_as_if_named_once(seed, concepts):
    groups, retained = _case(seed, concepts=concepts)
    once = _everywhere(_statistics(groups, retained))
    twice = _everywhere(
        GroupStatistics(
            {f"{name}{i}": sums for name, sums in _statistics(groups, retained).forgotten.items() for i in "ab"},
            {f"{name}{i}": sums for name, sums in _statistics(groups, retained).reference.items() for i in "ab"},
            _statistics(groups, retained).pooled,
        )
    )
    _close(twice(retained), once(retained))


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


def test_each_position_of_a_map_is_erased_by_its_own_statistics():
    shape, positions = (6, 2, 2), [1, 2]
    groups, retained = _case(3, positions=4)
    gone = groups["0"][0]
    eraser = make_eraser(
        _statistics({"0": (gone[:, positions], None)}, retained[:, positions]), positions, granularity="each"
    )

    def as_map(rows):
        return rows.transpose(1, 2).reshape(-1, *shape)

    passed = [to_positions(eraser(as_map(rows))).mean(0) for rows in (gone, retained)]
    _close(passed[0][positions], passed[1][positions])
    assert (passed[0] - passed[1])[[0, 3]].abs().max() > 0.5


# --- statistics


@few
@given(seeds, st.integers(1, 3), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_statistics_of_clients_added_up_give_the_eraser_of_all_rows_together(seed, concepts, cuts):
    groups, _ = _case(seed, concepts=concepts)
    groups = {name: (gone, _draw(seed + 7, 80, 3, 6)) for name, (gone, _) in groups.items()}
    edges = sorted(cuts)
    clients = [
        {name: (g, k) for name, g, k in zip(groups, gone, kept, strict=True)}
        for gone, kept in zip(
            zip(*(gone.tensor_split(edges) for gone, _ in groups.values()), strict=True),
            zip(*(kept.tensor_split(edges) for _, kept in groups.values()), strict=True),
            strict=True,
        )
    ]
    added = _statistics(clients[0])
    for client in map(_statistics, clients[1:]):
        added = GroupStatistics(
            {name: sums + client.forgotten[name] for name, sums in added.forgotten.items()},
            {name: sums + client.reference[name] for name, sums in added.reference.items()},
            added.pooled + client.pooled,
        )
    one, other = _everywhere(added), _everywhere(_statistics(groups))
    features = torch.randn(5, 3, 6)
    _close(one(features), other(features), 1e-4)
    torch.testing.assert_close(one.concept, other.concept)


@pytest.mark.parametrize("few_are", ["forgotten", "retained"])
def test_of_too_few_rows_no_eraser_is_made(few_are):
    gone, kept = _draw(0, 60, 3, 6, shift=3), _draw(1, 60, 3, 6)
    for count in (0, LEAST_ROWS - 1):
        pair = (gone[:count], kept) if few_are == "forgotten" else (gone, kept[:count])
        with pytest.raises(DataError, match="too few"):
            _everywhere(_statistics({"0": pair}))
    pair = (gone[:LEAST_ROWS], kept) if few_are == "forgotten" else (gone, kept[:LEAST_ROWS])
    assert _everywhere(_statistics({"0": pair})).rank == 1


def test_a_group_of_too_few_rows_is_left_out_of_the_eraser():
    groups, retained = _case(0, concepts=2)
    alone = {"0": groups["0"]}
    with_few = {**alone, "1": (groups["1"][0][: LEAST_ROWS - 1], retained)}
    assert _everywhere(_statistics(with_few, retained)).rank == 1
    assert torch.equal(
        _everywhere(_statistics(with_few, retained)).concept, _everywhere(_statistics(alone, retained)).concept
    )


def test_statistics_that_are_not_finite_give_no_eraser():
    groups, retained = _case(0)
    statistics = _statistics(groups, retained)
    broken = GroupStatistics(
        statistics.forgotten, statistics.reference, Moments(9, statistics.pooled.sums, statistics.pooled.squares)
    )
    broken.pooled.squares[0, 0, 0] = torch.inf
    with pytest.raises(DataError, match="not finite"):
        _everywhere(broken)


def test_more_channels_than_rows_and_channels_that_never_change_are_no_obstacle():
    gone, kept = _draw(0, 25, 2, 40, shift=2), _draw(1, 25, 2, 40)
    for rows in (gone, kept):
        rows[:, :, :7] = 0
        rows[:, 1] = 0  # a dead position
    eraser = _everywhere(_statistics({"0": (gone, kept)}))
    _close(eraser(gone).mean(0), eraser(kept).mean(0))
    assert torch.equal(eraser(kept)[:, 1], kept[:, 1])


# --- as a module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 2, 2), (4, 6)])
def test_dtype_and_shape_of_features_are_kept(dtype, shape):
    groups, retained = _case(0, positions=4)
    eraser = make_eraser(_statistics({"0": (groups["0"][0][:, [2]], None)}, retained[:, [2]]), (2,), granularity="each")
    features = torch.randn(5, *shape).to(dtype)
    passed = eraser(features)
    assert passed.dtype == dtype
    assert passed.shape == features.shape
    before, after = to_positions(features), to_positions(passed)
    assert torch.equal(after[:, [0, 1, 3]], before[:, [0, 1, 3]])
    assert not torch.equal(after[:, 2], before[:, 2])
    torch.testing.assert_close(passed, eraser(features.float()).to(dtype))


@pytest.mark.parametrize("kind", ["each", "tokens"])
def test_features_in_double_precision_are_left_bit_for_bit_elsewhere(kind):
    features = torch.randn(5, 3, 6, dtype=torch.float64)
    if kind == "tokens":
        assert torch.equal(_token_eraser()[0](features), features)
    groups, retained = _case(0)
    eraser = make_eraser(_statistics({"0": (groups["0"][0][:, :1], None)}, retained[:, :1]), (0,), granularity="each")
    assert torch.equal(eraser(features)[:, 1:], features[:, 1:])


def test_an_eraser_works_under_autocast():
    eraser, features = _everywhere(_statistics(*_case(0, concepts=2))), torch.randn(5, 3, 6)
    expected = eraser(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(eraser(features), expected, atol=0.1, rtol=0.1)


def test_no_rows_give_no_rows():
    assert _everywhere(_statistics(*_case(0)))(torch.randn(0, 3, 6)).shape == (0, 3, 6)


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


def _both_kinds():
    groups, retained = _case(0, concepts=2)
    return [_everywhere(_statistics(groups, retained)), _token_eraser()[0]]


def _three(count):
    """Rows of three positions that either kind changes."""
    return _texts(5, count, length=3)[0]


@pytest.mark.parametrize("eraser", _both_kinds(), ids=["each", "tokens"])
def test_an_eraser_comes_back_from_its_weights_bit_for_bit(eraser):
    again, features = load_eraser(eraser.state_dict(), eraser.granularity), _three(20)
    assert type(again) is type(eraser)
    assert again.granularity == eraser.granularity
    assert again.size_bytes == eraser.size_bytes == sum(w.nbytes for w in eraser.state_dict().values())
    assert not again.training
    assert torch.equal(again(features), eraser(features))
    assert not torch.equal(eraser(features), features)


def test_weights_of_an_unknown_kind_are_refused():
    with pytest.raises(SettingError):
        load_eraser(_both_kinds()[0].state_dict(), "some")


@pytest.mark.parametrize("eraser", _both_kinds(), ids=["each", "tokens"])
def test_a_copy_of_an_eraser_is_one_of_its_own(eraser):
    twin, features = copy.deepcopy(eraser), _three(20)
    expected = eraser(features)
    assert torch.equal(twin(features), expected)
    twin.concept.zero_()
    if isinstance(twin, TokenEraser):
        twin.limit.fill_(torch.inf)
    assert torch.equal(twin(features), features)
    assert torch.equal(eraser(features), expected)


@pytest.mark.parametrize("eraser", _both_kinds(), ids=["each", "tokens"])
def test_an_eraser_can_be_exported_for_any_number_of_rows(eraser):
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(eraser, (torch.randn(4, 3, 6),), dynamic_shapes=({0: rows},)).module()
    features = _three(11)
    assert not torch.equal(eraser(features), features)
    torch.testing.assert_close(exported(features), eraser(features))


def test_features_get_gradients_and_the_eraser_has_nothing_to_train():
    eraser, features = _both_kinds()[0], torch.randn(5, 3, 6, requires_grad=True)
    eraser(features).square().sum().backward()
    assert features.grad.abs().sum() > 0
    assert not list(eraser.parameters())


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


def test_tokens_stand_out_however_many_of_them_there_are():
    eraser, _ = _token_eraser(length=4)
    fresh, places = _texts(2, 30, length=4)
    assert (eraser(fresh) != fresh).any(2)[torch.arange(30), places].all()


def test_tokens_pass_up_to_the_limit_and_no_further():
    one = torch.tensor([[[1.0], [0.0]]])
    eraser = TokenEraser(one, one, torch.zeros(1, 1), mean=torch.tensor([7.0, 8.0]), limit=torch.tensor([2.0]))
    tokens = torch.tensor([[[2.0, 5.0], [2.01, 5.0], [-9.0, 5.0]]])
    assert eraser(tokens).tolist() == [[[2.0, 5.0], [7.0, 8.0], [-9.0, 5.0]]]


def test_any_of_several_things_makes_a_token_stand_out():
    both = torch.eye(3)[None, :, :2]
    limit = torch.tensor([2.0, 1.0])
    eraser = TokenEraser(both, both, torch.zeros(1, 2), mean=torch.zeros(3), limit=limit)
    tokens = torch.tensor([[[3.0, 0, 1], [0, 1.5, 1], [1.5, 0.5, 9]]])
    assert eraser(tokens).tolist() == [[[0, 0, 0], [0, 0, 0], [1.5, 0.5, 9]]]


def test_the_limit_is_in_deviations_of_what_is_read_off_a_token():
    gone, kept = _draw(0, 4000, 1, 6) + _draw(5, 1, 1, 6, shift=3), _draw(0, 4000, 1, 6)
    statistics = _statistics({"0": (gone, kept)})
    eraser = make_eraser(statistics, (0,), granularity="tokens")
    read = torch.cat([gone, kept])[:, 0] @ eraser.readout[0]
    torch.testing.assert_close(eraser.limit, STANDS_OUT * read.std(0, correction=0), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 6), (6, 2, 4)])
def test_tokens_keep_dtype_and_shape_and_the_places_of_a_map_are_tokens(dtype, shape):
    eraser, _ = _token_eraser()
    fresh, places = _texts(2, 10)
    features = (fresh if len(shape) == 2 else fresh.transpose(1, 2).reshape(-1, *shape)).to(dtype)
    passed = eraser(features)
    assert passed.dtype == dtype
    assert passed.shape == features.shape
    before, after = (to_positions(one, "each") for one in (features, passed))
    changed = (before != after).any(2)
    assert changed.sum() == 10
    assert changed[torch.arange(10), places].all()


def test_an_eraser_says_what_it_is():
    eraser = _both_kinds()[0]
    assert isinstance(eraser, Eraser)
    assert not isinstance(eraser, TokenEraser)
    assert eraser.concept.shape == eraser.readout.shape == (3, 6, 2)
    assert eraser.offset.shape == (3, 2)
    assert eraser.positions.tolist() == [0, 1, 2]
    assert all(weight.dtype in (torch.float32, torch.int64) for weight in eraser.state_dict().values())
