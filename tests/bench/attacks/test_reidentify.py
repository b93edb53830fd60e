"""Re-identification: the bound is right and tight, the attack works where nothing protects, and fails under DP."""

import math

import pytest
import torch
from tests.bench._progress import silent

from fedup.bench.attacks import EPSILONS, guarantees
from fedup.bench.attacks import reidentify as module
from fedup.bench.attacks.canary import QuarterNoise
from fedup.bench.attacks.reidentify import bound, reidentify
from fedup.errors import DataError
from fedup.privacy import DP


def simulated(candidates: torch.Tensor, sigma: float, trials: int = 40_000) -> float:
    """How often the likeliest candidate is the true one, all equally likely, in Gaussian noise."""
    source = torch.Generator().manual_seed(0)
    truth = torch.randint(len(candidates), (trials,), generator=source)
    seen = candidates[truth] + sigma * torch.randn(trials, candidates.shape[1], generator=source)
    scores = seen @ candidates.T - candidates.square().sum(1) / 2
    return float((scores.argmax(1) == truth).float().mean())


@pytest.mark.parametrize("mu", [0.2, 1.2])
def test_the_bound_is_reached_by_two_opposite_records_and_passed_with_less_noise(mu):
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert simulated(opposite, 1 / mu) == pytest.approx(bound(mu, 2), abs=0.01)
    assert simulated(opposite, 0.5 / mu) > bound(mu, 2) + 0.03


@pytest.mark.parametrize(("mu", "count"), [(0.5, 10), (4.0, 100)])
def test_the_bound_holds_for_records_in_all_directions(mu, count):
    source = torch.Generator().manual_seed(1)
    for dims in (2, 200):  # crowded, and nearly orthogonal
        records = torch.nn.functional.normalize(torch.randn(count, dims, generator=source), dim=1)
        reached = simulated(records, 1 / mu)
        assert 0.9 / count < reached < bound(mu, count) + 0.01


def test_without_information_the_bound_is_chance_and_it_is_below_that_of_epsilon_and_delta():
    assert bound(0.0, 100) == pytest.approx(0.01)
    for dp in guarantees().values():
        assert 0.01 < bound(dp.mu, 100) < math.exp(dp.epsilon) / 100 + dp.delta


@pytest.mark.parametrize("dp", [DP(1.0, clip="unit"), DP(1.0, clip=2.0, cells=3), DP(1.0, clip=1.0, projection="none")])
def test_a_clients_statistics_are_what_its_records_add(ground, dp):
    points, client = ground.points(dp), ground.federation.clients[1]
    exact = ground.exact(dp, points)[client.id]
    labels = ground.federation.y[client.train]
    for label in labels.unique().tolist():
        own = ground.contributions(dp, points[client.train[labels == label]])
        assert float(own.norm(dim=1).max()) <= dp.sensitivity + 1e-9
        assert torch.allclose(own.sum(0), exact[label])


def test_centroids_give_records_away_and_messages_under_dp_do_not(ground):
    results = reidentify(ground, trials=80, seed=3, progress=silent)
    by_name = {result.protection: result for result in results if result.name == module.NEAREST}
    informed = {result.protection: result for result in results if result.name == module.INFORMED}
    assert len(by_name) == 2 + len(EPSILONS)
    assert list(informed) == [name for name in by_name if name.startswith("DP")]
    for name, result in [*by_name.items(), *informed.items()]:
        assert result.low <= result.figure <= result.high and result.chance == 0.01
        assert not result.exceeds
        assert result.figure < 0.12 if name.startswith("DP") else result.low > 0.5
    assert by_name["DP, ε = 8"].bound == bound(guarantees()["DP, ε = 8"].mu, 100)


def test_the_attack_does_better_against_less_noise_and_the_same_seed_gives_the_same_figures(ground, monkeypatch):
    names = {"sound": DP(8.0, clip="unit"), "broken": QuarterNoise(8.0, clip="unit"), "open": DP(5e4, clip="unit")}
    monkeypatch.setattr(module, "guarantees", lambda: names)
    results, again = (reidentify(ground, trials=60, candidates=4, progress=silent) for _ in range(2))
    found = {result.protection: result for result in results if result.name == module.INFORMED}
    assert found["broken"].low > found["sound"].figure
    assert found["open"].figure > 0.9
    assert again == results


def test_more_candidates_than_there_are_rows_are_refused(ground):
    with pytest.raises(DataError, match="fewer candidates"):
        reidentify(ground, trials=1, candidates=5000, progress=silent)
