"""The demo: three requests (a lying client, a class, a backdoor's samples), each answered, compared with retraining and
taken back."""

import time
from typing import Any

import torch
from torch import nn

from fedup.bench.demo_exact import exact_part
from fedup.bench.scenarios import Situation, scenario_class
from fedup.clients.collect import collect
from fedup.errors import SettingError
from fedup.federation import Federation
from fedup.models.features import FeatureReader
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel, plug
from fedup.statistics.store import Centroids
from fedup.tasks.datasets import Dataset, input_of
from fedup.tasks.evaluation import accuracy_per_class, predict, retain_and_forget
from fedup.tasks.machine import describe_machine
from fedup.tasks.progress import Progress, RoundsShown
from fedup.tasks.recipe import Recipe
from fedup.training.fedavg import Trained
from fedup.unlearning.unlearn import restore, unlearn

_SCENARIOS: dict[str, dict[str, Any]] = {
    "client": {},
    "class": {"classes": (7,)},
    "sample": {"share": 0.4, "holders": 3},
}
_IMAGES, _POINTS = 10, 1200  # that the report draws of a request
_PARTITION = "dirichlet:1"  # digits are few: with 0.5 many clients have fewer than five rows of a class to report


def run_demo(
    *, data: str = "digits", clients: int = 10, rounds: int | None = None, seed: int = 0, progress: Progress
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Train, answer a client, a class and a sample request, retrain for comparison, restore.

    All figures as plain data, and for each kind of request the points and pixels that figures are drawn of.
    """
    started = time.perf_counter()
    recipe = Recipe.suited_to(data, model="lenet5", clients=clients, rounds=rounds, partition=_PARTITION, seed=seed)
    if recipe.rounds < 1:
        raise SettingError(f"The demo trains for at least 1 round; found {recipe.rounds}.")
    dataset = recipe.load()
    honest = recipe.federation(dataset)
    start = recipe.blank_model(dataset.x.shape[1:], dataset.num_classes)
    requests, drawings, about = [], {}, {}
    for name, settings in _SCENARIOS.items():
        scenario = scenario_class(name)(**settings)
        situation = scenario.prepare(honest, dataset=dataset, inputs=input_of(data), seed=seed)
        federation, request = situation.federation, situation.request
        learning = RoundsShown(progress, f"Federation learns, before the {name} request", recipe.rounds)
        trained = recipe.train(start, federation, observers=[learning])
        relearning = RoundsShown(progress, f"Retraining to {request}", recipe.rounds)
        retrained = recipe.train(start, federation.without(request), observers=[relearning])
        collecting = time.perf_counter()
        store = collect(trained.model, federation)
        about = {  # of the last federation: the others took as much
            "train_time_s": trained.time_s,
            "collect": {
                "time_s": time.perf_counter() - collecting,
                "bytes_up": store.size_bytes,
                "clients_contacted": len(store.bytes_up),
            },
        }
        progress(f"Answering: {request}", 0, 1)
        answer = _Answer(situation, dataset)
        requests.append(answer.run(trained.model, store, retrained))
        drawings[request.kind] = answer.drawings
        progress(f"Answering: {request}", 1, 1)
    result = {
        "data": data,
        "model": recipe.model,
        "clients": clients,
        "rounds": recipe.rounds,
        "seed": seed,
        "train_rows": len(honest.rows("train")),
        "class_names": list(dataset.class_names),
        **about,
        "requests": requests,
        "exact": exact_part(dataset, honest),
        "machine": describe_machine(),
        "total_time_s": time.perf_counter() - started,
    }
    return result, drawings


class _Answer:
    """One request: figures of the model in every state, and what is drawn of it."""

    def __init__(self, situation: Situation, dataset: Dataset) -> None:
        self._situation, self._dataset = situation, dataset
        self._figures: dict[str, Any] = {"accuracy_per_class": {}}
        self.drawings: dict[str, Any] = {}
        triggered = situation.triggered
        if triggered is not None:
            others = (triggered.y != triggered.target).nonzero().flatten()
            self._shown = others[:: max(1, len(others) // _IMAGES)][:_IMAGES]
            self._figures["attack"] = {"success": {}, "accuracy": {}, "answers": {}}
            self._figures["attack"]["true"] = triggered.y[self._shown].tolist()
            self.drawings["images"] = triggered.x[self._shown].mean(1).tolist()

    def run(self, model: nn.Module, store: Centroids, retrained: Trained) -> dict[str, Any]:
        """Serve the request, measure, take it back, measure again."""
        federation, request, test_x = self._situation.federation, self._situation.request, self._dataset.test_x
        hash_before, logits_before = fingerprint(model), predict(model, test_x)
        self._measure("original", model)
        plugged = plug(model)
        report = unlearn(plugged, store, request, clients=federation)
        self._measure("forgotten", plugged)
        self._measure("retrained", retrained.model)
        self.drawings["features"] = _features_in_2d(plugged, federation, request)
        filter_bytes = plugged.served.size_bytes if plugged.served else 0
        with plugged.restored():
            same_while_plugged = torch.equal(predict(plugged, test_x), logits_before)
        restore_report = restore(plugged, store, request, clients=federation)
        restored = plugged.unplug()
        self._measure("restored", restored)
        same_after = torch.equal(predict(restored, test_x), logits_before) and fingerprint(restored) == hash_before
        return {
            "kind": request.kind,
            "request": request.to_json(),
            "story": self._situation.story,
            **self._figures,
            "restored_bit_identical": same_while_plugged and same_after,
            "time_s": {**report.time_s, "total": report.total_time_s},
            "restore_time_s": restore_report.total_time_s,
            "retrain_time_s": retrained.time_s,
            "bytes": {"up": report.bytes_up, "down": report.bytes_down},
            "filter_bytes": filter_bytes,
            "clients_contacted": sorted(report.clients_contacted),
            "clients_counting": sorted(set(report.clients_counting)),
            "told": sorted({release.what for release in report.releases}),
            "erasure": report.erasure,
            "notes": report.notes,
            "verdict": report.verdicts[request.digest].to_json(),
        }

    def _measure(self, state: str, model: nn.Module) -> None:
        """Accuracies on what stays and what is forgotten, of each class, and under attack."""
        figures, data, triggered = self._figures, self._dataset, self._situation.triggered
        figures[state] = retain_and_forget(model, self._situation.federation, self._situation.request)
        figures["accuracy_per_class"][state] = accuracy_per_class(model, data.test_x, data.test_y, data.num_classes)
        if triggered is not None:
            answers, others = predict(model, triggered.x).argmax(1), triggered.y != triggered.target
            figures["attack"]["success"][state] = float((answers[others] == triggered.target).float().mean())
            figures["attack"]["accuracy"][state] = float((answers == triggered.y).float().mean())
            figures["attack"]["answers"][state] = answers[self._shown].tolist()


def _features_in_2d(plugged: PluggedModel, federation: Federation, request: Forget) -> dict[str, Any]:
    """Held-out features at the cut before and after the filter, on the first two principal axes of the former."""
    rows = federation.rows("heldout")
    rows = rows[torch.randperm(len(rows), generator=generator(0, "plot"))[:_POINTS]].sort().values
    before = FeatureReader(plugged.base, plugged.cut).read(federation.x, rows).values
    (seen,) = FeatureReader(plugged.view(), plugged.cut).batches(federation.x, rows, len(rows))
    after = seen[plugged.cut].flatten(1)  # what the last layer gets
    mean = before.mean(0)
    axes = torch.linalg.svd(before - mean, full_matrices=False).Vh[:2].T  # (D, 2)
    return {
        "before": ((before - mean) @ axes).tolist(),
        "after": ((after - mean) @ axes).tolist(),
        "labels": federation.y[rows].tolist(),
        "forgotten": torch.isin(rows, federation.forgotten(request, "heldout")).tolist(),
    }
