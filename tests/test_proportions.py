"""Shares and their differences: intervals that cover the truth."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedup.statistics.proportions import Estimate, Paired, weighted, wilson
from fedup.unlearning.verdict import find

many = settings(max_examples=40, deadline=None)


@st.composite
def pairs(draw, most=100):
    both, only_before, only_after, neither = draw(st.tuples(*[st.integers(0, most)] * 4).filter(any))
    return Paired(both + only_before + only_after + neither, both + only_before, both + only_after, both)


@many
@given(pairs(), pairs(), st.integers(2, 10))
def test_intervals_hold_their_value_turn_round_with_their_sides_and_narrow_with_more_rows(one, other, times):
    share, change, difference = one.share_after, one.change, one.share_after - other.share_after
    assert share.value == pytest.approx(one.after / one.rows)
    assert change.value == pytest.approx((one.after - one.before) / one.rows)
    assert 0 <= share.low <= share.high <= 1
    turned = Paired(one.rows, one.after, one.before, one.both).change, other.share_after - one.share_after
    for there, back in zip((change, difference), turned, strict=True):
        assert there.low <= there.value <= there.high
        assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))
    more = Paired(*(times * count for count in (one.rows, one.before, one.after, one.both)))
    assert more.share_after.width < share.width and more.change.width < change.width + 1e-12


def test_a_published_interval_of_a_change():
    """Responses before and after a therapy (Cavo et al. 2012), as R's `contingencytables` has it."""
    change = Paired(rows=161, before=75, after=65, both=59).change
    assert (change.value, change.low, change.high) == pytest.approx((-0.0621, -0.1186, -0.0046), abs=1e-4)


@many
@given(st.integers(1, 500))
def test_intervals_stay_wide_where_all_agree_and_no_rows_say_nothing(rows):
    least = 1.9 / (rows + 4)  # no fewer than about two rows more could still be otherwise
    for hits in (0, rows):
        paired = Paired(rows, hits, hits, hits)
        assert paired.change.value == 0 and min(paired.share_after.width, paired.change.width) > least
        assert (paired.share_after - paired.share_after).width > least
    assert wilson(0, 0) == Estimate(0.0, 0.0, 1.0)
    assert find(Paired().share_before, Paired().share_after, Paired().change) == "too few rows"


@many
@given(st.lists(st.tuples(st.floats(0.1, 10), pairs()), min_size=1, max_size=5))
def test_strata_are_worth_no_more_rows_than_they_have_and_have_the_share_of_the_proportions(strata):
    found, total = weighted(strata), sum(weight for weight, _ in strata)
    for name in ("before", "after", "both"):
        expected = sum(weight / total * getattr(one, name) / one.rows for weight, one in strata)
        assert getattr(found, name) / found.rows == pytest.approx(expected, abs=1e-9)
    rows = [one.rows for _, one in strata]
    assert min(rows) * (1 - 1e-9) <= found.rows <= sum(rows) + 1e-6
    together, added = weighted((one.rows, one) for _, one in strata), sum((one for _, one in strata), Paired())
    assert (together.rows, together.after) == pytest.approx((added.rows, added.after))
    assert weighted([]) == weighted([(1.0, Paired())]) == weighted([(0.0, strata[0][1])]) == Paired()


def test_intervals_cover_the_truth():
    """In nearly 95 % of all outcomes: of differences, each as likely as it is, and of changes, drawn."""
    (rows, others), shares = (30, 90), (0.02, 0.3, 0.8, 0.95)

    def likely(n, share):
        return [math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]

    intervals = {(i, k): wilson(i, rows) - wilson(k, others) for i in range(rows + 1) for k in range(others + 1)}
    for one, other in product(shares, shares):
        own, beside = likely(rows, one), likely(others, other)
        covering = [at for at, found in intervals.items() if found.low - 1e-9 <= one - other <= found.high + 1e-9]
        assert sum(own[i] * beside[k] for i, k in covering) >= 0.92, (one, other)
    draws, rows, source = 2000, 60, torch.Generator().manual_seed(0)
    for both, only_before, only_after in [(0.9, 0.05, 0.0), (0.6, 0.2, 0.1), (0.05, 0.05, 0.3), (0.95, 0.02, 0.02)]:
        kinds = torch.tensor([both, only_before, only_after, 1 - both - only_before - only_after])
        drawn = torch.multinomial(kinds.expand(draws, 4), rows, replacement=True, generator=source)
        counts = torch.stack([(drawn == kind).sum(1) for kind in range(3)], 1).tolist()
        changes = [Paired(rows, kept + lost, kept + won, kept).change for kept, lost, won in counts]
        covered = sum(change.low <= only_after - only_before <= change.high for change in changes)
        assert covered / draws >= 0.92, (both, only_before, only_after)
