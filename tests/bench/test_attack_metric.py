"""The membership attack on single rows: calibrated by shadow federations that treat withdrawn and unseen rows alike."""

import json
from dataclasses import replace

import pytest
import torch

from fedup.bench.case import Case
from fedup.bench.experiment import BenchCell, Group, Named, load_experiment
from fedup.bench.methods import method_class
from fedup.bench.metrics.attack import calibrated, measure
from fedup.bench.results import Results
from fedup.bench.runner import run_cells
from fedup.bench.scenarios import scenario_class
from fedup.bench.shadow_federations import confidence, halves
from fedup.bench.shared_setup import SharedSetup
from fedup.errors import SettingError
from fedup.tasks.recipe import Recipe

RECIPE = Recipe.suited_to("digits", rounds=2, clients=4, rows=900, batch_size=32, seed=103)
SHADOWS = 4


def group(scenario: str, shadows: int = SHADOWS) -> Group:
    return Group(RECIPE, Named(scenario, scenario, scenario_class(scenario)()), shadow_federations=shadows)


def test_every_row_is_outside_of_one_half_of_the_shadow_federations_and_validation_rows_of_all():
    federation = RECIPE.federation(RECIPE.load())
    inside = torch.zeros(len(federation.y), dtype=torch.int64)
    for pair in range(3):
        for half in halves(federation, 7, pair):
            inside[half.rows()] += 1
            for client, whole in zip(half.clients, federation.clients, strict=True):
                assert torch.isin(client.train, torch.cat([whole.train, whole.heldout])).all()
    usable = torch.cat([federation.rows("train"), federation.rows("heldout")])
    assert (inside[usable] == 3).all() and int(inside.sum()) == 3 * len(usable)
    assert not torch.equal(*(halves(federation, 7, pair)[0].rows() for pair in (0, 1)))


def test_scenarios_that_leave_the_data_as_they_are_share_their_shadow_federations(cache):
    first = SharedSetup(group("random_samples"), "cpu", lambda *step: None)
    calibration = first.data.shadow_federations.calibration(first.data.ids("heldout"))
    kept = sorted((cache / "federations").glob("*.safetensors"))
    assert len(kept) == SHADOWS
    second = SharedSetup(group("clean_client"), "cpu", lambda *step: None)
    again = second.data.shadow_federations.calibration(second.data.ids("heldout"))
    assert sorted((cache / "federations").glob("*.safetensors")) == kept
    assert torch.equal(calibration.outside, again.outside)
    trained = second.data.shadow_federations.calibration(second.data.federation.rows())
    assert (trained.inside - trained.outside).mean() > 0  # a model is surer of rows that it trained on
    assert SharedSetup(group("clean_client", 0), "cpu", lambda *step: None).data.shadow_federations is None


def test_the_attack_finds_members_of_any_difficulty_and_calls_unseen_rows_unseen():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 3, torch.arange(1500) % 3
    hard = torch.randn(600, generator=draw) - 1, torch.randn(1500, generator=draw)  # withdrawn rows are harder
    noise = torch.randn(600, generator=draw), torch.randn(1500, generator=draw)
    unseen = tuple((3 * own + other).double() for own, other in zip(hard, noise, strict=True))
    same = calibrated(unseen, labels, hard)
    assert abs(float(same[0].mean()) - 0.5) < 0.05 and abs(float(same[1].mean()) - 0.5) < 0.02
    known = calibrated((unseen[0] + 2, unseen[1]), labels, hard)
    assert float(known[0].mean()) > 0.85 and torch.equal(known[1], same[1])
    few = torch.zeros(4, dtype=torch.int64)
    assert calibrated((unseen[0][:4], unseen[1]), (few, labels[1]), (hard[0][:4], hard[1])) is None
    other = torch.full((600,), 7)  # a class without unseen rows
    assert calibrated(unseen, (other, labels[1]), hard) is None


def test_a_removed_logit_has_a_confidence_that_files_can_hold():
    logits = torch.tensor([[-torch.inf, 1.0, 2.0], [3.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0]])
    sure = confidence(logits, torch.tensor([0, 0, 2]))
    assert torch.isfinite(sure).all() and sure[0] < 0 < sure[1]
    assert sure[2] == pytest.approx(-float(torch.tensor(2.0).log()), abs=1e-6)  # one in three


def test_results_have_the_attack_with_its_interval_and_the_shadow_federations_are_trained_once(cache, tmp_path):
    methods = [Named(name, name, method_class(name)()) for name in ("retrain", "none")]
    cells, results = [BenchCell(group("random_samples"), method) for method in methods], Results(tmp_path)
    assert [event.outcome for event in run_cells(cells, results, progress=lambda *step: None)] == ["done", "done"]
    for cell in cells:
        stored = json.loads(results.path(cell).read_text())
        figures = stored["metrics"]
        assert 0 <= figures["attack_low"] < figures["attack_auc"] < figures["attack_high"] <= 1
        assert stored["shadow_federations"] == SHADOWS
        assert cell.hash == replace(cell, group=group("random_samples", 0)).hash  # other results keep their names
    setup = SharedSetup(group("random_samples", 0), "cpu", lambda *step: None)
    setup.make(reference=True)
    unlearned, outputs = setup.answer(method_class("none")())
    assert set(measure(Case(unlearned, outputs, setup.original, setup.retrained)).values()) == {None}


@pytest.mark.parametrize("count", ["3", "2", "-4", '"many"'])
def test_shadow_federations_come_in_pairs(tmp_path, count):
    path = tmp_path / "mine.toml"
    parts = '[[federations]]\ndata = "digits"\n[scenarios.class]\n[methods.fedup]\n'
    path.write_text(f"shadow_federations = {count}\n{parts}")
    with pytest.raises(SettingError, match=r"mine\.toml: .*shadow_federations"):
        load_experiment(path)
    path.write_text(f"shadow_federations = 16\n{parts}")
    assert next(load_experiment(path).groups()).shadow_federations == 16
