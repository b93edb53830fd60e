"""Figures of withdrawn rows by hand: the share of the gap closed, the worst class, the holder of both models."""

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from fedup import Federation, Forget
from fedup.bench.case import Case, EvaluationData, Outputs
from fedup.bench.cost import Cost
from fedup.bench.metrics import metric
from fedup.bench.metrics.delta_gradient import alignment
from fedup.bench.scenarios import Situation
from fedup.bench.task import Unlearned
from fedup.federation import Client
from fedup.tasks.datasets import Dataset

WITHDRAWN, RETAINED, UNSEEN, CLASSES = 100, 200, 200, 2
Y = torch.arange(WITHDRAWN + RETAINED + UNSEEN) % CLASSES
_SPLIT = torch.arange(len(Y)).split([WITHDRAWN, RETAINED, UNSEEN])
SETS = dict(zip(("forgotten", "retained", "heldout"), _SPLIT, strict=True))
TEST_Y = torch.arange(40) % CLASSES


def outputs(data: EvaluationData, sure: dict[str, torch.Tensor]) -> Outputs:
    """A model that answers each row's label with this confidence."""
    logits = {}
    for rows, margin in sure.items():
        labels = data.labels(rows)
        logits[rows] = margin.double()[:, None] * one_hot(labels, CLASSES)
    return Outputs(nn.Identity(), data, logits)


def case(now: dict[str, torch.Tensor], original: dict[str, torch.Tensor], retrained: dict[str, torch.Tensor]) -> Case:
    x, none = torch.zeros(len(Y), 1), torch.arange(0)
    client = Client(0, torch.cat([SETS["forgotten"], SETS["retained"]]), none, SETS["heldout"])
    federation = Federation(x, Y, (client,), CLASSES)
    situation = Situation(federation, Forget.samples({0: SETS["forgotten"].tolist()}), "Rows.")
    data = EvaluationData(situation, Dataset("rows", x, Y, torch.zeros(len(TEST_Y), 1), TEST_Y, ("a", "b")))
    return Case(Unlearned(nn.Identity(), Cost()), *(outputs(data, sure) for sure in (now, original, retrained)))


def right(share: float, count: int = WITHDRAWN) -> torch.Tensor:
    """Confidence of so many rows above 0, of the others below."""
    return torch.where(torch.arange(count) < share * count, 1.0, -1.0)


@pytest.mark.parametrize(
    ("now", "retrained", "closed"),
    [(0.9, 0.7, 0.0), (0.7, 0.7, 1.0), (0.75, 0.7, 0.75), (0.65, 0.7, 0.75), (1.0, 0.7, -0.5), (0.9, 0.89, None)],
)
def test_the_share_of_the_gap_counts_a_step_too_far_as_a_distance_and_claims_nothing_below_two_points(
    now, retrained, closed
):
    found = metric("closed").measure(case(*({"forgotten": right(share)} for share in (now, 0.9, retrained))))
    expected = None if closed is None else pytest.approx(closed)
    assert found == {"closed": expected, "closed_loss": expected}  # here losses are linear in accuracy


def test_the_worst_class_is_the_one_that_loses_most_on_the_test_set():
    ours, before = torch.ones(40), torch.ones(40)
    ours[1], before[0] = -1, -1  # one of twenty rows lost, of the other class one gained
    found = metric("class_change").measure(case({"test": ours}, {"test": before}, {"test": before}))
    assert found["class_change"] == pytest.approx(-0.05)


def test_the_holder_of_both_models_finds_rows_by_the_change_and_nothing_where_all_change_alike():
    draw = torch.Generator().manual_seed(0)
    before = {rows: 3 * torch.randn(len(own), generator=draw) for rows, own in SETS.items()}
    noise = {rows: 0.1 * torch.randn(len(own), generator=draw) for rows, own in SETS.items()}
    alike = {rows: 0.5 * sure + noise[rows] for rows, sure in before.items()}  # surer rows lose more
    found = metric("holder").measure(case(alike, before, before))
    assert abs(found["holder_auc"] - 0.5) < 0.1 and abs(found["holder_retained"] - 0.5) < 0.1
    assert found["holder_low"] < found["holder_auc"] < found["holder_high"]
    told = metric("holder").measure(case({**alike, "forgotten": alike["forgotten"] - 1}, before, before))
    assert told["holder_auc"] > 0.9 and told["holder_retained"] > 0.9
    assert metric("holder").measure(case(before, before, before))["holder_auc"] == 0.5  # nothing changed


def test_a_delta_made_of_gradients_points_at_its_own_rows():
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)).eval()
    x, y = torch.randn(60, 8, generator=draw), torch.arange(60) % CLASSES
    nn.functional.cross_entropy(model(x[:5]), y[:5]).backward()
    change = {"0.weight": model[0].weight.grad.clone(), "0.bias": model[0].bias.grad.clone()}
    before = [weight.detach().clone() for weight in model.parameters()]
    cosines = alignment(model, change, x, y)
    assert cosines[:5].mean() > cosines[5:].mean() + 0.2 and bool((cosines.abs() <= 1 + 1e-9).all())
    assert torch.allclose(alignment(model, {name: -own for name, own in change.items()}, x, y), -cosines)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
