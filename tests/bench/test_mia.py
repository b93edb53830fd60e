"""Membership inference against counting by hand, on models that answer what a table says."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench._table import Table

from fedup import Federation, Forget
from fedup.bench.case import Case, EvaluationData, Outputs
from fedup.bench.cost import Cost
from fedup.bench.metrics import metric
from fedup.bench.metrics.mia import COLUMNS, _auc, _tpr
from fedup.bench.scenarios import Situation
from fedup.bench.task import Unlearned
from fedup.federation import Client
from fedup.tasks.datasets import Dataset

INFINITY = float("inf")
few = settings(max_examples=40, deadline=None)
SCORES = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 0, allow_nan=False), st.just(-INFINITY)),
    min_size=1,
    max_size=25,
)


# --- the formulas


def _scores(values):
    return torch.tensor(values, dtype=torch.float64)


@few
@given(SCORES, SCORES)
def test_auc_is_the_share_of_pairs_won_with_ties_as_half(members, others):
    pairs = [(one > other) + 0.5 * (one == other) for one in members for other in others]
    assert _auc(_scores(members), _scores(others)) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@few
@given(SCORES, SCORES, st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]))
def test_tpr_is_the_best_of_all_thresholds_within_the_alarms(members, others, alarms):
    possible = [
        sum(score > threshold for score in members) / len(members)
        for threshold in others  # between two of them nothing is gained but members above the lower one
        if sum(score > threshold for score in others) <= alarms * len(others)
    ]
    assert _tpr(_scores(members), _scores(others), alarms=alarms) == pytest.approx(max(possible))


# --- the metric


class World:
    """Two clients whose rows are numbers: client 0 is forgotten, `many` rows trained on and as many held out."""

    def __init__(self, many=60, heldout=None, retained=None):
        heldout, retained = many if heldout is None else heldout, many if retained is None else retained
        self.parts = torch.arange(many + heldout + retained + 70).split([many, heldout, retained, 60, 10])
        self.members, self.others, self.retained, self.unasked, validation = self.parts
        rows = sum(map(len, self.parts))
        self.x, self.y = torch.arange(rows).float()[:, None], torch.arange(rows) % 3
        self.federation = Federation(
            self.x,
            self.y,
            (
                Client(0, train=self.members, validation=validation[:5], heldout=self.others),
                Client(1, train=self.retained, validation=validation[5:], heldout=self.unasked),
            ),
            num_classes=3,
        )
        self.logits = torch.zeros(rows, 3)

    def sure(self, rows, how):
        """Logits of the right class of these rows."""
        self.logits[rows, self.y[rows]] = torch.as_tensor(how, dtype=torch.float32)
        return self

    def figures(self, request=None, original=None):
        dataset = Dataset("numbers", self.x, self.y, self.x[:3], self.y[:3], ("a", "b", "c"))
        data = EvaluationData(Situation(self.federation, request or Forget.clients([0]), "A story."), dataset)
        now = Table(self.logits)
        outputs = [Outputs(model, data) for model in (now, original or now, original or now)]
        return metric("mia").measure(Case(Unlearned(now, Cost()), *outputs))


def test_the_score_is_the_loss_of_each_row():
    world = World(many=40, heldout=50)
    scores = torch.randn(90, generator=torch.Generator().manual_seed(0))
    figures = world.sure(world.members, scores[:40]).sure(world.others, scores[40:]).figures()
    members, others = scores[:40].tolist(), scores[40:].tolist()  # a larger logit of the right class, a smaller loss
    won = sum(one > other for one in members for other in others)
    assert figures["mia_auc"] == pytest.approx(won / (40 * 50))
    assert figures["mia_tpr"] == sum(one > max(others) for one in members) / 40


def test_held_out_rows_of_what_stays_and_the_other_models_do_not_count():
    world = World()
    scores = torch.linspace(-3, 3, 60)
    expected = world.sure(world.members, scores + 1).sure(world.others, scores).figures()
    assert 0.5 < expected["mia_auc"] < 1
    world.sure(world.unasked, 9.0)
    original = Table(torch.randn_like(world.logits))
    found = world.figures(original=original)
    assert found == expected


def test_of_a_class_request_the_held_out_rows_of_all_clients_in_that_class_count():
    world = World(many=150)
    named = (world.y == 1).nonzero().flatten()
    members, others = (named[torch.isin(named, rows)] for rows in (world.members, world.others))
    stay = named[torch.isin(named, world.unasked)]
    assert len(members) == len(others) == 50
    world.sure(torch.cat([members, named[torch.isin(named, world.retained)]]), 1.0).sure(others, 0.0).sure(stay, 2.0)
    figures = world.figures(Forget.classes([1]))
    assert figures["mia_auc"] == pytest.approx(len(others) / (len(others) + len(stay)))


@pytest.mark.parametrize(
    ("many", "heldout", "retained", "lacking"),
    [
        (40, 40, 40, set()),
        (60, 39, 60, {"mia_auc", "mia_tpr"}),
        (39, 60, 60, {"mia_auc", "mia_tpr", "mia_learned"}),
        (60, 60, 39, {"mia_learned"}),
    ],
)
def test_forty_rows_of_each_side_are_enough_and_fewer_have_no_figures(many, heldout, retained, lacking):
    figures = World(many=many, heldout=heldout, retained=retained).figures()
    assert set(figures) == {column.key for column in COLUMNS} == {"mia_auc", "mia_tpr", "mia_learned"}
    assert {name for name, figure in figures.items() if figure is None} == lacking
    assert {column.better for column in COLUMNS} == {"retrain"}


# --- the paper's attack


def test_the_papers_attack_finds_how_sure_a_model_is_and_nothing_where_that_does_not_differ():
    world, source = World(many=300, retained=300), torch.Generator().manual_seed(0)
    world.sure(world.members, 2.5 + 0.1 * torch.randn(300, generator=source))
    world.sure(world.retained, 1.5 + 0.1 * torch.randn(300, generator=source))  # 0.86 and 0.69 sure
    assert world.figures()["mia_learned"] > 0.9
    alike, scores = World(many=300, retained=300), torch.randn(300, generator=source)
    alike.sure(alike.members, scores).sure(alike.retained, scores)
    assert abs(alike.figures()["mia_learned"] - 0.5) < 0.1
    other = World(many=200, retained=200)
    other.logits[other.members, 0] = 4.0
    other.logits[other.retained, 2] = 4.0  # other classes, equally sure
    assert abs(other.figures()["mia_learned"] - 0.5) < 0.1


def test_sides_of_unequal_size_are_balanced_so_that_guessing_the_larger_one_wins_nothing():
    world = World(many=60, retained=1500)
    scores = torch.randn(1560, generator=torch.Generator().manual_seed(1))
    world.sure(world.members, scores[:60]).sure(world.retained, scores[60:])
    assert world.figures()["mia_learned"] < 0.75


def test_the_papers_attack_is_the_same_at_any_time_and_leaves_random_states_alone():
    world = World(many=200, retained=200)
    scores = torch.randn(400, generator=torch.Generator().manual_seed(0))
    world.sure(world.members, scores[:200] + 1).sure(world.retained, scores[200:])
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = world.figures()
    torch.manual_seed(5)
    np.random.seed(5)
    assert world.figures() == first
    torch.set_rng_state(before[0])
    world.figures()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[2]
