"""The core's figures on real data: class and flipped-client requests, each at 1× and 5× the step budget."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from fedup.bench.scenarios import scenario_class
from fedup.clients.collect import collect
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.partition import dirichlet
from fedup.request import Forget
from fedup.serving.plugged import plug
from fedup.statistics.store import Centroids
from fedup.tasks.datasets import input_of, load_dataset
from fedup.tasks.datasets._dataset import Dataset
from fedup.tasks.evaluation import predict, retain_and_forget
from fedup.tasks.machine import describe_machine
from fedup.tasks.models import build_model
from fedup.training.fedavg import federate
from fedup.training.local import LocalTraining
from fedup.unlearning.unlearn import unlearn

Progress = Callable[[str, int, int], None]

BUDGETS = (1, 5)


def run_seed(
    data: str,
    seed: int,
    *,
    clients: int = 10,
    rounds: int = 10,
    classes: Sequence[int] | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """All measurements of one seed, as plain data."""
    dataset = load_dataset(data)
    local = LocalTraining()
    honest = Federation.split(dataset.x, dataset.y, dirichlet(dataset.y, clients, seed=seed), seed=seed)
    flipped = scenario_class("client")().prepare(honest, dataset=dataset, inputs=input_of(data), seed=seed)
    poisoned, without_liar = flipped.federation, flipped.request
    torch.manual_seed(seed)
    start = build_model("lenet5", tuple(dataset.x.shape[1:]), dataset.num_classes)
    trained: list[nn.Module] = []
    for federation, what in (
        (honest, "honest clients"),
        (poisoned, "a client with flipped labels"),
        (poisoned.without(without_liar), "Retrain without that client"),
    ):
        progress(f"Seed {seed}: {what}", 0, 1)
        trained.append(federate(start, federation, rounds=rounds, local=local, seed=seed).model)
        progress(f"Seed {seed}: {what}", 1, 1)
    model, fooled, retrained = trained
    centroids = collect(model, honest, seed=seed)
    chosen = range(dataset.num_classes) if classes is None else classes
    results = [_measure(model, honest, centroids, Forget.classes([label]), dataset) for label in chosen]
    client = _measure(fooled, poisoned, collect(fooled, poisoned, seed=seed), without_liar, dataset)
    client["retrained"] = retain_and_forget(retrained, poisoned, without_liar)
    return {
        "data": data,
        "seed": seed,
        "clients": clients,
        "rounds": rounds,
        "local": asdict(local),
        "filter": asdict(FilterConfig()),
        "requests": [*results, client],
        "machine": describe_machine(),
    }


def is_current(result: dict[str, Any], *, rounds: int) -> bool:
    """Whether a result was measured under the settings in force."""
    wanted = {"rounds": rounds, "local": asdict(LocalTraining()), "filter": asdict(FilterConfig())}
    return all(result.get(key) == value for key, value in wanted.items())


def _measure(
    model: nn.Module, federation: Federation, centroids: Centroids, request: Forget, dataset: Dataset
) -> dict[str, Any]:
    """One request at every step budget, and whether the restored model is the original one."""
    original = predict(model, dataset.test_x)
    result: dict[str, Any] = {
        "kind": request.kind,
        "request": request.to_json(),
        "original": retain_and_forget(model, federation, request),
        "time_s": {},
    }
    identical = True
    for budget in BUDGETS:
        config = replace(FilterConfig(), steps=FilterConfig().steps * budget)
        if request.class_ids:
            unguarded = plug(model)
            unlearn(unguarded, centroids, request, config=replace(config, guard=False), force=True)
            result[f"unguarded_{budget}x"] = retain_and_forget(unguarded, federation, request)
        plugged = plug(model)
        report = unlearn(plugged, centroids, request, config=config, force=True)
        result[f"forgotten_{budget}x"] = retain_and_forget(plugged, federation, request)
        result["time_s"][f"{budget}x"] = report.total_time_s
        with plugged.restored():
            identical &= torch.equal(predict(plugged, dataset.test_x), original)
        identical &= torch.equal(predict(plugged.unplug(), dataset.test_x), original)
    return result | {"restored_bit_identical": identical}


def summary_rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table over all seeds: figure, mean, worst, goal, met."""
    of_class = [r for result in results for r in result["requests"] if r["kind"] == "class"]
    of_client = [r for result in results for r in result["requests"] if r["kind"] == "client"]
    rows = []
    for budget in BUDGETS:
        state = f"forgotten_{budget}x"
        rows.append(_row(f"class, {budget}× steps: F-A", [r[state]["forget"] for r in of_class], 0.01))
        unguarded = [r[f"unguarded_{budget}x"]["forget"] for r in of_class]
        rows.append(_row(f"class, {budget}× steps, guard off (for comparison): F-A", unguarded, None))
        lost = [100 * (r["original"]["retain"] - r[state]["retain"]) for r in of_class]
        rows.append(_row(f"class, {budget}× steps: R-A lost, points", lost, 0.5))
        behind = [100 * (r["retrained"]["retain"] - r[state]["retain"]) for r in of_client]
        rows.append(_row(f"flipped client, {budget}× steps: R-A behind Retrain, points", behind, 0.3))
        gaps = [(r["original"]["forget"], r[state]["forget"], r["retrained"]["forget"]) for r in of_client]
        left = [abs(now - goal) / max(abs(before - goal), 1e-9) for before, now, goal in gaps]
        rows.append(_row(f"flipped client, {budget}× steps: share of the F-A gap to Retrain left", left, 0.5))
    same = [float(not r["restored_bit_identical"]) for r in [*of_class, *of_client]]
    rows.append(_row("all requests: restored model differs in a bit (0 no, 1 yes)", same, 0))
    return rows


def _row(name: str, values: list[float], goal: float | None) -> list[str]:
    worst = max(values)
    judged = ["–", "–"] if goal is None else [f"≤ {goal:g}", "yes" if worst <= goal else "no"]
    return [name, f"{statistics.fmean(values):.4f}", f"{worst:.4f}", *judged, str(len(values))]
