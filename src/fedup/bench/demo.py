"""The demo: three requests (a lying client, a class, a backdoor's samples), each answered, compared with retraining and
taken back."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedup.bench.scenarios import Situation, Triggered, scenario_class
from fedup.clients.collect import collect
from fedup.errors import SettingError
from fedup.federation import Federation
from fedup.filters.presets import preset
from fedup.models.cut import read_features
from fedup.models.taps import Taps
from fedup.models.views import fingerprint
from fedup.partition import dirichlet
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import PluggedModel, plug
from fedup.statistics.store import Centroids
from fedup.tasks.datasets import defaults_of, input_of, load_dataset
from fedup.tasks.evaluation import accuracy_per_class, predict, retain_and_forget
from fedup.tasks.machine import describe_machine
from fedup.tasks.models import build_model
from fedup.tasks.progress import Progress, RoundsShown
from fedup.training.fedavg import federate
from fedup.training.local import LocalTraining
from fedup.unlearning.unlearn import restore, unlearn

_SCENARIOS: dict[str, dict[str, Any]] = {
    "client": {},
    "class": {"classes": (7,)},
    "sample": {"share": 0.4, "holders": 3},
}
_SHOWN = 10  # triggered images in the report


@dataclass(frozen=True)
class DemoRequest:
    """A situation and the model that a request finds there."""

    situation: Situation
    model: nn.Module
    centroids: Centroids


def run_demo(
    *, data: str = "digits", clients: int = 10, rounds: int | None = None, seed: int = 0, progress: Progress
) -> dict[str, Any]:
    """Train, answer a client, a class and a sample request, retrain for comparison, restore; all as plain data."""
    started = time.perf_counter()
    dataset = load_dataset(data)
    defaults = defaults_of(data)
    rounds = defaults.rounds if rounds is None else rounds
    if rounds < 1:
        raise SettingError(f"The demo trains for at least 1 round; found {rounds}.")
    local = LocalTraining(batch_size=defaults.batch_size)
    honest = Federation.split(dataset.x, dataset.y, dirichlet(dataset.y, clients, seed=seed), seed=seed)
    inputs = input_of(data)
    client, absent, backdoor = (
        scenario_class(name)(**settings).prepare(honest, dataset=dataset, inputs=inputs, seed=seed)
        for name, settings in _SCENARIOS.items()
    )
    torch.manual_seed(seed)
    start = build_model("lenet5", tuple(dataset.x.shape[1:]), dataset.num_classes)

    def train(federation: Federation, what: str) -> tuple[nn.Module, float]:
        watch = RoundsShown(progress, what, rounds)
        trained = federate(start, federation, rounds=rounds, local=local, seed=seed, observers=[watch])
        return trained.model, trained.time_s

    model, train_time_s = train(honest, "Federation learns")
    fooled, _ = train(client.federation, "Federation learns, a client with wrong labels")
    trapped, _ = train(backdoor.federation, "Federation learns, a backdoor among its samples")
    collect_started = time.perf_counter()
    centroids = collect(model, honest, seed=seed)
    collect_time_s = time.perf_counter() - collect_started
    cases = [
        DemoRequest(client, fooled, collect(fooled, client.federation, seed=seed)),
        DemoRequest(absent, model, centroids),
        DemoRequest(backdoor, trapped, collect(trapped, backdoor.federation, seed=seed)),
    ]
    requests = []
    for case in cases:
        request = case.situation.request
        retrained, retrain_time_s = train(case.situation.federation.without(request), f"Retraining to {request}")
        progress(f"Answering: {request}", 0, 1)
        requests.append(_answer(case, retrained, retrain_time_s, dataset.test_x, dataset.test_y))
        progress(f"Answering: {request}", 1, 1)
    return {
        "data": data,
        "model": "lenet5",
        "clients": clients,
        "rounds": rounds,
        "seed": seed,
        "train_rows": len(honest.rows("train")),
        "class_names": list(dataset.class_names),
        "train_time_s": train_time_s,
        "collect": {
            "time_s": collect_time_s,
            "bytes_up": centroids.size_bytes,
            "clients_contacted": len(centroids.bytes_up),
            "centroids": len(centroids.vectors),
            "ratio": preset().ratio,
        },
        "requests": requests,
        "machine": describe_machine(),
        "total_time_s": time.perf_counter() - started,
    }


def _answer(
    case: DemoRequest, retrained: nn.Module, retrain_time_s: float, test_x: torch.Tensor, test_y: torch.Tensor
) -> dict[str, Any]:
    """Serve the request, measure, take it back, measure again."""
    federation, request, model = case.situation.federation, case.situation.request, case.model
    hash_before, logits_before = fingerprint(model), predict(model, test_x)
    per_class = {"original": accuracy_per_class(model, test_x, test_y, federation.num_classes)}
    result: dict[str, Any] = {
        "kind": request.kind,
        "request": request.to_json(),
        "story": case.situation.story,
        "original": retain_and_forget(model, federation, request),
        "retrained": retain_and_forget(retrained, federation, request),
    }
    plugged = plug(model)
    report = unlearn(plugged, case.centroids, request, clients=federation)
    if case.situation.triggered is not None:
        models = {"original": model, "forgotten": plugged, "retrained": retrained}
        result["attack"] = _under_attack(models, case.situation.triggered)
    result["forgotten"] = retain_and_forget(plugged, federation, request)
    per_class["forgotten"] = accuracy_per_class(plugged, test_x, test_y, federation.num_classes)
    result["features"] = _features_in_2d(plugged, federation, request)
    filter_bytes = plugged.served.size_bytes if plugged.served else 0
    with plugged.restored():
        same_while_plugged = torch.equal(predict(plugged, test_x), logits_before)
    restore_report = restore(plugged, case.centroids, request, clients=federation)
    restored = plugged.unplug()
    result["restored"] = retain_and_forget(restored, federation, request)
    per_class["restored"] = accuracy_per_class(restored, test_x, test_y, federation.num_classes)
    per_class["retrained"] = accuracy_per_class(retrained, test_x, test_y, federation.num_classes)
    same_after = torch.equal(predict(restored, test_x), logits_before) and fingerprint(restored) == hash_before
    return result | {
        "accuracy_per_class": per_class,
        "restored_bit_identical": same_while_plugged and same_after,
        "time_s": {**report.time_s, "total": report.total_time_s},
        "restore_time_s": restore_report.total_time_s,
        "retrain_time_s": retrain_time_s,
        "bytes": {"up": report.bytes_up, "down": report.bytes_down},
        "filter_bytes": filter_bytes,
        "clients_contacted": sorted(report.clients_contacted),
        "clients_counting": sorted(set(report.clients_counting)),
        "told": sorted({release.what for release in report.releases}),
        "centroids_used": report.centroids_used,
        "erasure": report.erasure,
        "notes": report.notes,
        "verdict": report.verdicts[request.digest].to_json(),
    }


def _under_attack(models: dict[str, nn.Module], triggered: Triggered) -> dict[str, Any]:
    """What models make of test images with the trigger: success of the attack, accuracy, and some images."""
    others = (triggered.y != triggered.target).nonzero().flatten()
    answers = {state: predict(model, triggered.x).argmax(1) for state, model in models.items()}
    shown = others[:: max(1, len(others) // _SHOWN)][:_SHOWN]
    return {
        "success": {s: float((a[others] == triggered.target).float().mean()) for s, a in answers.items()},
        "accuracy": {s: float((a == triggered.y).float().mean()) for s, a in answers.items()},
        "images": triggered.x[shown].mean(1).tolist(),
        "true": triggered.y[shown].tolist(),
        "answers": {state: found[shown].tolist() for state, found in answers.items()},
    }


def _features_in_2d(plugged: PluggedModel, federation: Federation, request: Forget, most: int = 1200) -> dict[str, Any]:
    """Held-out features at the cut before and after the filter, on the first two principal axes of the former."""
    rows = federation.rows("heldout")
    rows = rows[torch.randperm(len(rows), generator=generator(0, "plot"))[:most]].sort().values
    before = read_features(plugged.base, plugged.cut, federation.x, rows).values
    (seen,) = Taps(plugged.view(), [plugged.cut]).read(federation.x, rows, len(rows))  # what the last layer gets
    after = seen[plugged.cut].flatten(1)
    mean = before.mean(0)
    axes = torch.linalg.svd(before - mean, full_matrices=False).Vh[:2].T  # (D, 2)
    named = torch.isin(rows, federation.forgotten(request, "heldout"))
    return {
        "before": ((before - mean) @ axes).tolist(),
        "after": ((after - mean) @ axes).tolist(),
        "labels": federation.y[rows].tolist(),
        "forgotten": named.tolist(),
    }
