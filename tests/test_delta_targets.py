"""What forgotten rows should look like: unseen rows of the same rank."""

import torch
from torch import nn

from fedup.filters import delta_fit, delta_targets
from fedup.filters.delta_fit import DeltaRows, DeltaRule, fit_delta
from fedup.filters.delta_targets import Losses, hardness_of, unseen_targets

LABELS = Losses(torch.arange(60) % 3, torch.arange(600) % 3, torch.arange(300) % 3)


def losses(seed=0):
    """Unseen rows have ten times the losses of trained ones."""
    draws = torch.Generator().manual_seed(seed)
    trained, unseen = torch.rand(660, generator=draws), torch.rand(300, generator=draws)
    return Losses(trained[:60], trained[60:], 10 * unseen)


def test_ranks_count_and_not_how_much_smaller_trained_losses_are():
    of, right = losses(), torch.ones(300)
    smaller = Losses(of.forgotten**3 / 9, of.retained**3 / 9, of.unseen)
    first, second = (unseen_targets(own, LABELS, right).losses for own in (of, smaller))
    assert torch.allclose(first, second)
    assert abs(float(first.mean() - of.unseen.mean())) < 1, "random rows look like all unseen ones"
    for label in range(3):
        own = LABELS.forgotten == label
        assert bool((first[own][of.forgotten[own].argsort()].diff() >= 0).all()), "the hardest row gets the largest"


def test_unusual_rows_get_larger_losses_and_few_of_them_less_so():
    of, right, hard = losses(), torch.ones(300), Losses(torch.zeros(60), -torch.ones(600), -torch.rand(300))
    unusual = Losses(0.8 + 0.2 * of.forgotten, 0.8 * of.retained, of.unseen)
    usual, larger = (float(unseen_targets(own, LABELS, right).losses.mean()) for own in (of, unusual))
    assert larger > usual + 2
    few = Losses(unusual.forgotten[:6], unusual.retained, of.unseen)
    labels = Losses(LABELS.forgotten[:6], LABELS.retained, LABELS.unseen)
    assert float(unseen_targets(few, labels, right).losses.mean()) < larger - 1
    agreeing = Losses(hard.forgotten, hard.retained, of.unseen)  # as if early features knew what is hard
    assert float(unseen_targets(of, LABELS, right, agreeing).losses.mean()) > usual + 1
    disagreeing = Losses(hard.forgotten, hard.retained, -of.unseen)
    assert torch.equal(
        unseen_targets(of, LABELS, right, disagreeing).losses, unseen_targets(of, LABELS, right).losses
    ), "what unseen rows do not bear out counts for nothing"


def test_a_class_with_few_unseen_rows_is_compared_with_all():
    of, right = losses(), torch.ones(300)
    none_of_a_class = Losses(LABELS.forgotten, LABELS.retained, LABELS.unseen % 2)
    targets = unseen_targets(of, none_of_a_class, right)
    assert bool(targets.losses.isfinite().all()) and bool((targets.losses <= of.unseen.max()).all())


def test_unusual_rows_get_the_same_targets_where_retained_rows_are_sampled(monkeypatch):
    draws = torch.Generator().manual_seed(2)
    x, y = torch.randn(2600, 8, generator=draws), torch.randint(3, (2600,), generator=draws)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).requires_grad_(False)
    hardest = 200 + nn.functional.cross_entropy(model(x[200:]), y[200:], reduction="none").argsort(descending=True)
    rows, rule = DeltaRows(hardest[:400], hardest[400:], torch.arange(200)), DeltaRule(steps=1)
    whole = fit_delta(model, "2", x, y, rows, rule=rule)
    monkeypatch.setattr(delta_fit, "_MOST_ROWS", 200)
    sampled = fit_delta(model, "2", x, y, rows, rule=rule)
    assert abs(sampled.loss_unseen - whole.loss_unseen) < 0.05 * whole.loss_unseen


def test_hardness_is_that_of_a_ridge_regression_without_the_row(monkeypatch):
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(50, 8, generator=draws), torch.arange(50) % 3
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    rows = Losses(torch.arange(10), torch.arange(10, 35), torch.arange(35, 50))
    whole = hardness_of(model, "0", x, y, rows)
    # Predicted anew as a forgotten row, from the same others; standardisation and mean differ a little.
    for place in range(0, 15, 5):
        left_out = rows.unseen[place]
        others = rows.unseen[rows.unseen != left_out]
        again = hardness_of(
            model, "0", x, y, Losses(torch.cat([rows.forgotten, left_out[None]]), rows.retained, others)
        )
        assert abs(float(again.forgotten[-1] - whole.unseen[place])) < 0.15
    spread = whole.unseen.std()
    assert float(spread) > 0.15, "premise: hardness differs by more than that"
    monkeypatch.setattr(delta_targets, "_MOST_AT_ONCE", 3)
    by_parts = hardness_of(model, "0", x, y, rows)
    assert torch.corrcoef(torch.stack([by_parts.forgotten, whole.forgotten]))[0, 1] > 0.95, "in their order"
    assert hardness_of(model, "0", x.fill_(torch.nan), y, rows) is None
