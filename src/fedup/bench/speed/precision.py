"""Whether bfloat16 holds: the same federations on real data, trained in it and in single precision. Only when asked."""

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from fedup.bench.speed._rows import Row, Tell
from fedup.tasks.evaluation import accuracy
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Runtime

_SEEDS = (0, 1, 2)
_ROWS = 10_000
_FEDERATIONS: tuple[dict[str, Any], ...] = (
    {"data": "mnist", "model": "lenet5", "rounds": 5},
    {"data": "cifar10", "model": "resnet18", "rounds": 20},
    {"data": "cifar10", "model": "vit", "rounds": 20},
    {"data": "ag_news", "model": "tinybert", "rounds": 10},
)


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """Test accuracy in bfloat16 less that in single precision, in points: the mean over seeds."""
    for settings in _FEDERATIONS:
        both: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
        for seed in _SEEDS:
            for precision, runs in both.items():
                recipe = Recipe.suited_to(**settings, seed=seed, precision=precision, rows=_ROWS)
                tell(f"{recipe.model} on {recipe.data} in {precision}, seed {seed}")
                runs.append(_train(recipe, device))
        pairs = zip(both["bfloat16"], both["float32"], strict=True)
        points = [100 * (half["accuracy"] - single["accuracy"]) for half, single in pairs]
        yield Row(
            f"{settings['model']} on {settings['data']}: accuracy in bfloat16 less in float32",
            statistics.fmean(points),
            "points",
            detail={**settings, "rows": _ROWS, "seeds": list(_SEEDS), "points": points, **both},
        )


def _train(recipe: Recipe, device: torch.device) -> dict[str, float]:
    dataset = recipe.load()
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    trained = recipe.train(start, recipe.federation(dataset), runtime=Runtime(device))
    return {
        "accuracy": accuracy(trained.model, dataset.test_x.to(device), dataset.test_y.to(device)),
        "time_s": trained.time_s,
    }
