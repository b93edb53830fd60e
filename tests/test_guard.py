"""The guard of a dropped class: a bound on the filter that no input and no length of training gets past."""

import pytest
import torch
from tests._forced import unlearn
from torch import nn

from fedup import FilterConfig, Forget, plug
from fedup.filters.fit import Examples, fit_filter
from fedup.filters.guard import Guard

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, CLASSES, RANK = 12, 5, 6
MAP = (8, 2, 2)  # channels, height and width of what a filter acts on position by position


def _guard(tail, forgotten, *, nonnegative=False, vectors=None, rows=None, seed=0):
    vectors = torch.randn(40, WIDTH) if vectors is None else vectors
    rows = torch.arange(len(vectors)) if rows is None else rows
    return Guard.against(forgotten, tail=tail, vectors=vectors, rows=rows, nonnegative=nonnegative, seed=seed)


def _deep_tail():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def _lead(logits, forgotten):
    """How far the best forgotten logit is above the mean retained one."""
    retained = [label for label in range(logits.shape[1]) if label not in forgotten]
    return logits[:, forgotten].amax(1) - logits[:, retained].mean(1)


def _strongest_inputs(fitted, tail, forgotten):
    """Inputs that gradient ascent finds to lift the forgotten classes, of any size and sign."""
    inputs = (10 * torch.randn(64, WIDTH)).requires_grad_()
    optimizer = torch.optim.Adam([inputs], lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        (-_lead(tail(fitted(inputs)), forgotten).sum()).backward()
        optimizer.step()
    return inputs.detach()


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("forgotten", [[1], [0, 2, 3]], ids=str)
def test_with_a_linear_tail_no_input_lifts_a_forgotten_logit_above_the_mean_retained_one(nonnegative, forgotten):
    tail, vectors = nn.Linear(WIDTH, CLASSES, bias=False), torch.randn(60, WIDTH)
    vectors = vectors.relu() if nonnegative else vectors
    kept = torch.tensor([label for label in range(CLASSES) if label not in forgotten])
    labels = kept[torch.arange(60) % len(kept)]
    highest = {}
    for guarded in ((), forgotten):
        examples = Examples(vectors, torch.arange(60), labels, nonnegative, guarded)
        fitted = fit_filter(tail, examples, FilterConfig(rank=RANK, steps=60))
        passed = fitted(_strongest_inputs(fitted, tail, forgotten))
        lead = _lead(tail(passed).detach(), forgotten)
        highest[bool(guarded)] = float((lead / passed.norm(dim=1).clamp(min=1e-6)).max())
    assert highest[False] > 0.01, "premise: without the guard some input does"
    assert highest[True] <= 1e-5


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("forgotten", [[1], [0, 2, 3]], ids=str)
def test_a_forgotten_class_with_the_largest_bias_is_no_answer_to_any_input(nonnegative, forgotten):
    """Where nothing passes the filter, biases answer."""
    tail = nn.Linear(32, CLASSES)
    with torch.no_grad():
        tail.bias[forgotten] = tail.bias.max() + torch.arange(1.0, len(forgotten) + 1)
    vectors = torch.randn(60, 32).relu() if nonnegative else torch.randn(60, 32)
    kept = torch.tensor([label for label in range(CLASSES) if label not in forgotten])
    labels = kept[torch.arange(60) % len(kept)]
    examples = Examples(vectors, torch.arange(60), labels, nonnegative, forgotten)
    inputs = torch.cat([torch.zeros(1, *MAP), -1e6 * torch.rand(200, *MAP), 10 * torch.randn(2000, *MAP)])
    answers = {}
    for guard in (False, True):
        config = FilterConfig(rank=RANK, steps=60, guard=guard)
        fitted = fit_filter(tail, examples, config)
        answers[guard] = set(tail(fitted(inputs).flatten(1)).argmax(1).tolist())
    assert answers[False] & set(forgotten), "premise"
    assert not answers[True] & set(forgotten)


def test_a_constant_is_added_only_where_a_forgotten_class_leads_by_its_bias_and_ends_that():
    tail = nn.Linear(WIDTH, CLASSES)
    for lead in (5e-4, 2.0):
        nn.init.zeros_(tail.bias).data[1:3] = torch.tensor([-1.0, lead])
        assert _guard(tail, [1]).constant() is None
        assert (_lead(tail(_guard(tail, [2]).constant()[None]), [2]) < 0).all()


def test_where_bounds_conflict_no_constant_makes_a_lead_larger():
    one = torch.tensor([1.0, 0.0])
    for slopes in (torch.stack([one, -one]), torch.stack([one, one.flip(0)])):
        for leads in (torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0])):
            for nonnegative in (False, True):
                guard = Guard(slopes, nonnegative=nonnegative, slopes=slopes, leads=leads)
                added = guard.constant()
                assert added is None or float((slopes @ added + leads).max()) < float(leads.max())


@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_bound_is_the_one_of_the_docstring(nonnegative):
    tail, decoder = nn.Linear(WIDTH, CLASSES), torch.randn(WIDTH, RANK)
    u = tail.weight[1] - tail.weight[[0, 2, 4]].mean(0)
    u = (u / u.norm()).detach()
    rises, falls = u.clamp(min=0), u.clamp(max=0)
    written = decoder.clamp(min=0) if nonnegative else decoder
    expected = rises @ written + falls @ decoder
    torch.testing.assert_close(_guard(tail, [1, 3], nonnegative=nonnegative).excess(decoder)[0], expected)


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("forgotten", [[1], [0, 2, 3]], ids=str)
def test_finish_brings_every_column_within_every_bound(nonnegative, forgotten):
    guard, decoder = _guard(_deep_tail(), forgotten, nonnegative=nonnegative), torch.randn(WIDTH, 40)
    assert guard.excess(decoder).max() > 0.1
    guard.finish(decoder)
    assert guard.excess(decoder).max() <= 1e-5
    assert decoder.norm(dim=0).min() > 0.01, "columns are moved, not deleted"


def test_one_bound_is_enforced_by_the_shortest_way_and_columns_within_it_are_left_bit_for_bit():
    tail, decoder = nn.Linear(WIDTH, CLASSES), torch.randn(WIDTH, 40)
    guard, before = _guard(tail, [1]), decoder.clone()
    within = guard.excess(decoder)[0] <= 0
    assert within.any() and not within.all()
    u = (tail.weight[1] - tail.weight[[0, 2, 3, 4]].mean(0)).detach()
    guard.enforce(decoder)
    torch.testing.assert_close(decoder, before - torch.outer(u, (u @ before).clamp(min=0) / u.square().sum()))
    assert torch.equal(decoder[:, within], before[:, within])


def test_neither_rows_that_are_not_retained_nor_the_callers_mode_change_a_bit():
    tail, vectors, decoder = _deep_tail(), torch.randn(80, WIDTH), torch.randn(WIDTH, RANK)
    rows = torch.arange(0, 80, 2)
    before = _guard(tail, [1], vectors=vectors, rows=rows).excess(decoder)
    vectors[1::2] = torch.nan
    with torch.no_grad():
        assert torch.equal(_guard(tail, [1], vectors=vectors, rows=rows).excess(decoder), before)
    assert all(weight.grad is None for weight in tail.parameters())


@pytest.mark.slow
def test_a_dropped_class_stays_forgotten_however_long_the_fit(trained_digits):
    digits, request, steps = trained_digits, Forget.classes([6]), FilterConfig().steps
    rows, kept = digits.federation.forgotten(request), digits.test_y != 6
    for many in (steps, 5 * steps):
        plugged = plug(digits.model)
        unlearn(plugged, digits.store(), request, config=FilterConfig(steps=many))
        assert float((plugged(digits.x[rows]).argmax(1) == 6).float().mean()) <= 0.01
        right = plugged(digits.test_x[kept]).argmax(1) == digits.test_y[kept]
        assert float(right.float().mean()) > 0.9
