"""How far the estimate of a class's loss of recall lies from the loss on test rows, where nobody counts.

    python tools/recall_estimate.py 100 digits:lenet5 mnist:lenet5:4000 cifar10:lenet5:4000

On a GPU if there is one. For each data set (data, model, training rows): requests for half of ten clients and half of
the classes, each answered from moments alone, on all seeds. The table in docs/closed_form.md is what this prints.
"""

import sys
from dataclasses import replace

import torch

import fedup
from fedup.tasks.evaluation import accuracy_per_class
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Runtime

ALLOWED = 5.0  # points of loss: more is refused
COLUMNS = (
    "data, model",
    "classes",
    "error of the estimated loss: median",
    "19 of 20 below",
    "beyond 3 points",
    "classes that lose more than 5 points",
    "of these expected to lose no more than that",
)


def losses(data, model, rows, seed):
    """For each class and request: the loss of recall that is expected, and that on test rows, in points."""
    recipe = Recipe.suited_to(data, model=model, rows=rows, seed=seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = recipe.load()
    loaded = replace(loaded, **{name: getattr(loaded, name).to(device) for name in ("x", "y", "test_x", "test_y")})
    federation, start = recipe.federation(loaded), recipe.blank_model(loaded.x.shape[1:], loaded.num_classes)
    trained = recipe.train(start.to(device), federation, runtime=Runtime(device=device)).model
    store = fedup.collect(trained, federation, statistics=fedup.MomentConfig(by_class="always"))
    before = accuracy_per_class(trained, loaded.test_x, loaded.test_y, loaded.num_classes)
    requests = [fedup.Forget.clients([client]) for client in federation.ids[::2]]
    for request in [*requests, *(fedup.Forget.classes([label]) for label in range(0, loaded.num_classes, 2))]:
        plugged = fedup.plug(trained)
        report = fedup.unlearn(plugged, store, request, force=True)
        after = accuracy_per_class(plugged, loaded.test_x, loaded.test_y, loaded.num_classes)
        for label, recall in report.class_recall.items():
            if label not in request.class_ids:
                yield recall.loss, 100 * (before[label] - after[label])


def main(arguments):
    seeds = [int(argument) for argument in arguments if argument.isdigit()]
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for named in (argument.split(":") for argument in arguments if not argument.isdigit()):
        data, model, rows = (*named, "0")[:3]
        pairs = torch.tensor([pair for seed in seeds for pair in losses(data, model, int(rows) or None, seed)])
        expected, counted = pairs.T
        errors, harmed = (expected - counted).abs(), counted > ALLOWED
        figures = f"{errors.median():.1f}", f"{errors.quantile(0.95):.1f}", f"{(errors > 3).double().mean():.0%}"
        unseen = int((expected[harmed] <= ALLOWED).sum())
        about = f"{data}, {model}{f', {int(rows):,} rows' if int(rows) else ''}"
        print(f"| {' | '.join([about, str(len(pairs)), *figures, str(int(harmed.sum())), str(unseen)])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
