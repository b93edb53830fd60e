"""Attacks on exact mode: a forgotten row reconstructed from what changed, and membership before and after."""

import statistics
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedup.bench.attacks import Result, shown
from fedup.bench.attacks.intervals import auc, clopper_pearson
from fedup.federation import Federation
from fedup.request import Forget
from fedup.rng import generator
from fedup.statistics.integer_moments import IntegerMoments
from fedup.tasks.backbones import load_backbone
from fedup.tasks.datasets import check_there, input_of
from fedup.tasks.machine import describe_code, describe_machine
from fedup.tasks.progress import Progress
from fedup.tasks.recipe import Recipe
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.learn_head import learn_head

_CANDIDATES = 100  # rows of the same class or others, one of which was forgotten
_ATTACK = "row from heads before and after"
_NOTES = {
    "totals": "the difference of totals is the row; the server has it",
    "heads": "who holds two heads and candidates finds the row among them",
}
_OWN_ROWS = "none, heads and own rows"
_ROUGH = "two heads, and the covariance of another client's rows: the features themselves, but for their length"


def run_exact_attacks(data: str, backbone: str, *, trials: int, seed: int, progress: Progress) -> dict[str, Any]:
    """Attack requests of one row and of a client, as plain data in the form of the other attacks."""
    check_there(data)
    recipe = Recipe.suited_to(data, rounds=1, seed=seed)
    dataset = recipe.load()
    federation = recipe.federation(dataset)
    public = load_backbone(backbone, tuple(dataset.x.shape[1:]), inputs=input_of(data).identity())
    model = learn_head(public, federation, num_classes=dataset.num_classes)
    results = [
        *reconstruct(model, federation, trials=trials, seed=seed, progress=progress),
        *membership(model, federation, progress=progress),
    ]
    return {
        "recipe": {**recipe.settings(), "model": backbone},
        "trials": trials,
        "candidates": _CANDIDATES,
        "command": f"fedup bench attack --exact --data {data} --backbone {backbone} --trials {trials} --seed {seed}",
        "results": [asdict(result) for result in results],
        "machine": describe_machine(),
        "code": describe_code(),
    }


def reconstruct(
    model: HeadModel, federation: Federation, *, trials: int, seed: int, progress: Progress
) -> list[Result]:
    """How often the forgotten row of a one-row request is found among candidates.

    M A = B gives the head A. Taking one row x away changes it by M⁻¹ x times the row's residual: the difference of two
    heads has one direction, and M times it is x, but for the mean. Who has rows of its own knows M roughly.
    """
    features, rows = _features(model, federation).double(), federation.rows("train")
    source, found = generator(seed, "reconstruct"), dict.fromkeys(_NOTES, 0)
    spread, mean = _covariance(model, features[federation.client(federation.ids[-1]).train], len(rows))
    holders = {int(row): client.id for client in federation.clients for row in client.train}
    cosines, chances = [], []
    for _ in shown(range(trials), "Rows from heads", progress):
        chosen = rows[torch.randperm(len(rows), generator=source)[:_CANDIDATES]]
        target, candidates = int(chosen[0]), features[chosen] - mean
        before, totals = model.head.weight.double().clone(), model.totals
        request = Forget.samples({holders[target]: [target]})
        model.unlearn(request, clients=federation)
        direction = _direction(before, model.head.weight.double())
        found["totals"] += _by_totals(totals - model.totals, features[chosen], model.store.config.step) == 0
        found["heads"] += int(_cosines(direction, candidates).argmax()) == 0
        cosines.append(float(_cosines(spread @ direction, candidates[:1])))
        chances.append(float(_cosines(candidates[1], candidates[:1])))
        model.restore(request, clients=federation)
    measure, guess, n = f"found among {_CANDIDATES}", 1 / _CANDIDATES, str(trials)
    rates = [
        Result(_ATTACK, measure, f"none, {name}", hits / trials, *clopper_pearson(hits, trials), guess, None, n, note)
        for (name, note), hits in zip(_NOTES.items(), found.values(), strict=True)
    ]
    mean_cosine, reach = statistics.fmean(cosines), 1.96 * statistics.stdev(cosines) / len(cosines) ** 0.5
    ends = mean_cosine - reach, mean_cosine + reach
    chance = statistics.fmean(chances)
    measured = Result(_ATTACK, "cosine", _OWN_ROWS, mean_cosine, *ends, chance, None, n, _ROUGH)
    return [*rates, measured]


def membership(model: HeadModel, federation: Federation, *, progress: Progress) -> list[Result]:
    """Rows of a client against held-out rows, by loss: before the request, after it, and learned without."""
    client = max(federation.clients, key=lambda each: len(each.train))
    request, results = Forget.clients([client.id]), []
    inside, outside = client.train, torch.cat([client.heldout, client.validation])
    without = learn_head(
        model.backbone, federation.without(request), num_classes=federation.num_classes, cache=model.cache
    )
    for state in shown(("before the request", "after the request", "learned without"), "Membership", progress):
        if state == "after the request":
            model.unlearn(request, clients=federation)
        judged = without if state == "learned without" else model
        members, others = (_scores(judged, federation, rows) for rows in (inside, outside))
        figure, low, high = auc(members, others)
        size = f"{len(inside)} and {len(outside)}"
        results.append(Result("membership by loss", "AUC", f"exact, {state}", figure, low, high, 0.5, None, size))
    model.restore(request, clients=federation)
    return results


@torch.no_grad()
def _features(model: HeadModel, federation: Federation) -> Tensor:
    return torch.cat([model.backbone(batch) for batch in federation.x.split(256)])


@torch.no_grad()
def _scores(model: HeadModel, federation: Federation, rows: Tensor) -> Any:
    losses = cross_entropy(model(federation.x[rows]), federation.y[rows], reduction="none")
    return -losses.double().numpy().astype(np.float64)


def _direction(before: Tensor, after: Tensor) -> Tensor:
    """The one direction of features in which two heads differ, whatever their scales. (D,)"""
    centred = [head - head.mean(0) for head in (before, after)]
    scale = (centred[0] * centred[1]).sum() / centred[0].square().sum()
    return torch.linalg.svd(centred[1] - scale * centred[0], full_matrices=False).Vh[0]


def _cosines(direction: Tensor, candidates: Tensor) -> Tensor:
    """How far candidates lie along a direction, of either sign. (N,)"""
    lengths = candidates.norm(dim=1) * direction.norm()
    return (candidates @ direction).abs() / lengths.clamp(min=1e-12)


def _covariance(model: HeadModel, own: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of rows of one's own, with the ridge that the rule adds; and their mean."""
    spread = torch.cov(own.T)
    ridge = model.rule.ridge + model.rule.few_rows * len(spread) / rows
    spread.diagonal().add_(ridge * spread.diagonal().mean())
    return spread, own.mean(0)


def _by_totals(difference: IntegerMoments, candidates: Tensor, step: float) -> int:
    row = difference.sums.sum(0).double() * step
    return int((candidates - row).norm(dim=1).argmin())
