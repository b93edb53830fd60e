"""`fedup bench speed`: what the core costs, as ratios in one run on whatever machine it finds."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedup.bench.accuracy import accuracy, retain_and_forget
from fedup.bench.literal import cluster_literally, fit_literally
from fedup.bench.machine import describe_machine
from fedup.bench.memory import peak_memory_ratio
from fedup.bench.models import build_model
from fedup.bench.synthetic import feature_federation
from fedup.centroids import Centroids, collect
from fedup.federation import Federation
from fedup.filter import Bottleneck, FilterConfig
from fedup.plugging import Served, plug
from fedup.request import Forget
from fedup.rng import generator
from fedup.unlearning import unlearn

Progress = Callable[[str, int, int], None]

RATIO = 0.8
REPEATS = 5
_CLASS, _CLIENT = 3, 0
_SAMPLES = 100


@dataclass(frozen=True)
class Row:
    """One line of the table: a measurement, its goal and whether it is met."""

    name: str
    value: float
    unit: str
    goal: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def run_speed(*, rows: int = 50_000, width: int = 512, literal: bool = True, progress: Progress) -> dict[str, Any]:
    """Measure clustering, requests, the literal recipe, memory and serving; all as plain data."""
    steps = iter(range(1, 100))
    total = 6 + literal

    def step(what: str) -> None:
        progress(f"Measuring {what}", 0, 1)
        done = next(steps)
        progress("Speed", done, total)

    federation, model = feature_federation(rows=rows, width=width)
    step("clustering")
    clustering_s, centroids = _median_time(lambda: collect(model, federation, ratio=RATIO))
    table = [Row("reading and clustering all cells", clustering_s, "s", 0.6)]
    times: dict[str, float] = {}
    accuracies: dict[str, dict[str, float]] = {}
    for request in (Forget.classes([_CLASS]), Forget.clients([_CLIENT]), _some_samples(federation)):
        step(f"a {request.kind} request")
        times[request.kind], accuracies[request.kind] = _time_request(model, federation, centroids, request)
        table.append(Row(f"{request.kind} request", times[request.kind], "s", 1.0 if request.sample_ids else 0.7))
    compared: dict[str, Any] = {}
    if literal:
        step("the paper's recipe taken literally (a minute or two)")
        compared = _compare_with_literal(model, federation)
        ours = clustering_s + times["class"]
        both = compared["clustering_s"] + compared["fit_s"]
        table += [
            Row(
                "clustering, against the literal recipe", compared["clustering_s"] / clustering_s, "×", 5, at_most=False
            ),
            Row("clustering and class request, likewise", both / ours, "×", 50, at_most=False),
        ]
    step("memory")
    table.append(Row("peak memory above the features", peak_memory_ratio(rows=rows, width=width), "× features", 1.2))
    step("serving")
    table.append(Row("ResNet-18 with a filter, batch 32", _serving_overhead(), "× base", 1.02))
    return {
        "rows": rows,
        "width": width,
        "clients": len(federation.clients),
        "classes": federation.num_classes,
        "ratio": RATIO,
        "repeats": REPEATS,
        "table": [{**row.__dict__, "met": row.met} for row in table],
        "accuracies": accuracies,
        "literal": compared,
        "machine": describe_machine(),
    }


def _median_time(work: Callable[[], Any]) -> tuple[float, Any]:
    """Median seconds of several runs after one to warm up, and the last result."""
    result, seconds = work(), []
    for _ in range(REPEATS):
        del result  # what is measured allocates as it would the first time
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def _some_samples(federation: Federation) -> Forget:
    rows = federation.clients[_CLIENT].train
    chosen = rows[torch.randperm(len(rows), generator=generator(0, "speed samples"))[:_SAMPLES]]
    return Forget.samples({_CLIENT: chosen.tolist()})


def _time_request(
    model: nn.Module, federation: Federation, centroids: Centroids, request: Forget
) -> tuple[float, dict[str, float]]:
    """Median seconds from request to effect, from the cache, and the accuracies it gives."""
    seconds = []
    for _ in range(REPEATS + 1):
        plugged = plug(model)
        cache = copy.deepcopy(centroids) if request.sample_ids else centroids  # a sample request replaces cells
        started = time.perf_counter()
        unlearn(plugged, cache, request, clients=federation)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), retain_and_forget(plugged, federation, request)


def _compare_with_literal(model: nn.Module, federation: Federation) -> dict[str, Any]:
    """The literal recipe for the same class request: its times and its accuracies."""
    request = Forget.classes([_CLASS])
    retained = federation.without(request)
    x, y = federation.x, federation.y
    cells = [
        client.train[y[client.train] == label] for client in retained.clients for label in y[client.train].unique()
    ]
    started = time.perf_counter()
    found = cluster_literally(x, cells, ratio=RATIO, seed=0)
    clustering_s = time.perf_counter() - started
    labels = torch.cat([y[rows[:1]].expand(len(centers)) for rows, centers in zip(cells, found, strict=True)])
    config = FilterConfig()
    head = model.get_submodule("head")
    started = time.perf_counter()
    fitted = fit_literally(
        head, torch.cat(found), labels, rank=config.rank, alpha=config.alpha, nonnegative=True, seed=0
    )
    fit_s = time.perf_counter() - started
    kept, gone = federation.retained(request, "heldout"), federation.forgotten(request, "heldout")

    def served(rows: Tensor) -> float:
        return accuracy(nn.Sequential(fitted, head), x[rows], y[rows])

    return {"clustering_s": clustering_s, "fit_s": fit_s, "retain": served(kept), "forget": served(gone)}


@torch.no_grad()
def _serving_overhead(batch: int = 32, pairs: int = 15) -> float:
    """Time with a filter over time without, calls interleaved so that drift hits both; median of the pairs."""
    base = build_model("resnet18", (3, 32, 32), 10).eval()
    plugged = plug(base)
    fitted = Bottleneck(512, 32, nonnegative=True).requires_grad_(False)
    plugged.serve(Served(fitted, frozenset(), FilterConfig(), plugged.base_fingerprint, plugged.cut))
    x = torch.randn(batch, 3, 32, 32)
    seconds: dict[nn.Module, list[float]] = {base: [], plugged: []}
    for i in range(pairs + 2):
        for model in (base, plugged) if i % 2 else (plugged, base):
            started = time.perf_counter()
            model(x)
            seconds[model].append(time.perf_counter() - started)
    return statistics.median(seconds[plugged][2:]) / statistics.median(seconds[base][2:])
