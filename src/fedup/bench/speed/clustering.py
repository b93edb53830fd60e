"""Clustering and requests: centroids of all cells, then a request of each kind, from the cache."""

import copy
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from fedup.bench.literal import cluster_literally, fit_literally
from fedup.bench.memory import peak_memory_ratio
from fedup.bench.speed._rows import Row, Tell, clocked, in_turns
from fedup.bench.synthetic import feature_federation
from fedup.clients.collect import collect
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import plug
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.store import Centroids
from fedup.tasks.evaluation import retain_and_forget
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import unlearn

RATIO = 0.8
REPEATS = 5
_CLASS, _CLIENT = 3, 0
_SAMPLES = 100


def measure(device: torch.device, tell: Tell, *, rows: int, width: int, literal: bool) -> Iterator[Row]:
    """On features made up: what is measured is what comes after the model. The literal recipe and memory: CPU only."""
    federation, model = feature_federation(rows=rows, width=width)
    federation, model = federation.to(device), model.to(device)
    size = {"rows": rows, "width": width, "clients": len(federation.clients), "classes": federation.num_classes}
    tell("clustering")
    usual = CentroidConfig(RATIO)
    collecting = in_turns(
        {"all": lambda: collect(model, federation, statistics=CentroidConfig(RATIO))}, device, repeats=REPEATS
    )
    clustering_s = collecting.median("all")
    yield Row("reading and clustering all cells", clustering_s, "s", 0.6, detail=size | {"ratio": RATIO})
    centroids = collect(model, federation, statistics=usual)
    times: dict[str, float] = {}
    for request in (Forget.classes([_CLASS]), Forget.clients([_CLIENT]), _some_samples(federation)):
        tell(f"a {request.kind} request")
        times[request.kind], accuracies = _time_request(model, federation, centroids, request)
        goal = 1.0 if request.sample_ids else 0.7
        yield Row(f"{request.kind} request", times[request.kind], "s", goal, detail=size | accuracies)
    if device.type != "cpu":
        return
    if literal:
        tell("the paper's recipe taken literally (a minute or two)")
        compared = _compare_with_literal(model, federation)
        faster = compared["clustering_s"] / clustering_s
        both = (compared["clustering_s"] + compared["fit_s"]) / (clustering_s + times["class"])
        name = "clustering, against the literal recipe"
        yield Row(name, faster, "× faster", 5, at_most=False, detail=compared)
        yield Row("clustering and class request, likewise", both, "× faster", 50, at_most=False, detail=compared)
    tell("memory")
    yield Row("peak memory above the features", peak_memory_ratio(rows=rows, width=width), "× features", 1.2)


def _some_samples(federation: Federation) -> Forget:
    rows = federation.clients[_CLIENT].train.cpu()
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
        answer = partial(unlearn, plugged, cache, request, clients=federation, force=True, terms=Terms(measure=False))
        seconds.append(clocked(answer, federation.x.device))
    return statistics.median(seconds[1:]), retain_and_forget(plugged, federation, request)


def _compare_with_literal(model: nn.Module, federation: Federation) -> dict[str, float]:
    """The literal recipe for the same class request: its times and its accuracies."""
    request = Forget.classes([_CLASS])
    x, y = federation.x, federation.y
    cells = [
        client.train[y[client.train] == label]
        for client in federation.without(request).clients
        for label in y[client.train].unique()
    ]
    started = time.perf_counter()
    clusters = cluster_literally(x, cells, ratio=RATIO, seed=0)
    clustered = time.perf_counter()
    labels = torch.cat([y[rows[:1]].expand(len(centers)) for rows, centers in zip(cells, clusters, strict=True)])
    config, head, centroids = FilterConfig(), model.get_submodule("head"), torch.cat(clusters)
    rank = config.rank_for(centroids.shape[1])
    fitted = fit_literally(head, centroids, labels, rank=rank, alpha=config.alpha, nonnegative=True, seed=0)
    times = {"clustering_s": clustered - started, "fit_s": time.perf_counter() - clustered}
    return times | retain_and_forget(nn.Sequential(fitted, head), federation, request)
