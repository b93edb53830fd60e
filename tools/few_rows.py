"""What it costs that clients report no class with fewer than five rows: a lying client is forgotten, with and without.

    python tools/few_rows.py 0 100 101 102

For each seed: retained and forgotten accuracy (held-out rows) on digits, 10 clients, Dirichlet 0.5. The table in
docs/closed_form.md is its output.
"""

import sys

import fedup
from fedup.bench.scenarios import scenario_class
from fedup.tasks.datasets import input_of
from fedup.tasks.evaluation import retain_and_forget
from fedup.tasks.recipe import Recipe

WAYS = {"five rows": fedup.MomentConfig(), "one row": fedup.MomentConfig(least_rows=1), "centroids": "centroids"}


def accuracies(model, situation):
    measured = retain_and_forget(model, situation.federation, situation.request)
    return f"{measured['retain']:.3f} / {measured['forget']:.3f}"


def main(seeds):
    names = ["seed", "fewest rows of a class outside the client", "nothing done", "Retrain", *WAYS]
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for seed in seeds:
        recipe = Recipe.suited_to("digits", model="lenet5", seed=seed)
        data = recipe.load()
        start = recipe.blank_model(data.x.shape[1:], data.num_classes)
        honest = recipe.federation(data)
        situation = scenario_class("client")().prepare(honest, dataset=data, inputs=input_of("digits"), seed=seed)
        federation, request = situation.federation, situation.request
        trained = recipe.train(start, federation).model
        rows = federation.y[federation.retained(request)].bincount(minlength=10)
        cells = [str(seed), str(int(rows.min())), accuracies(trained, situation)]
        cells.append(accuracies(recipe.train(start, federation.without(request)).model, situation))
        for statistics in WAYS.values():
            plugged = fedup.plug(trained)
            store = fedup.collect(trained, federation, statistics=statistics)
            fedup.unlearn(plugged, store, request, clients=federation)
            cells.append(accuracies(plugged, situation))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
