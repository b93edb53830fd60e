"""Clustering and requests: centroids of all cells, then a request of each kind, from the cache."""

import copy
import multiprocessing
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedup.bench.memory import STATUS, memory_bytes
from fedup.bench.speed._rows import Row, Tell
from fedup.bench.turns import clocked, in_turns
from fedup.clients.collect import collect
from fedup.federation import Federation
from fedup.filters.bottleneck import Bottleneck, FilterConfig
from fedup.partition import dirichlet
from fedup.request import Forget
from fedup.rng import generator
from fedup.serving.plugged import plug
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.kmeans import centroid_count
from fedup.statistics.store import Centroids
from fedup.tasks.evaluation import retain_and_forget
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import unlearn

RATIO = 0.8
REPEATS = 5
_CLASS, _CLIENT = 3, 0
_SAMPLES = 100
_WITHIN = 64  # dimensions in which rows of a class differ


def measure(device: torch.device, tell: Tell, *, rows: int, width: int, literal: bool) -> Iterator[Row]:
    """On made-up features: only what comes after the model is measured. The literal recipe and memory need a CPU."""
    federation, model = feature_federation(rows=rows, width=width)
    federation, model = federation.to(device), model.to(device)
    size = {"rows": rows, "width": width, "clients": len(federation.clients), "classes": federation.num_classes}
    tell("clustering")
    usual = CentroidConfig(RATIO)
    work = {"all": lambda: collect(model, federation, statistics=usual)}
    clustering_s = in_turns(work, device, repeats=REPEATS).median("all")
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
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = float(pool.apply(_peak_ratio, (rows, width)))
    yield Row("peak memory above the features", peak, "× features", 1.2)


def _some_samples(federation: Federation) -> Forget:
    rows = federation.clients[_CLIENT].train.cpu()
    chosen = rows[torch.randperm(len(rows), generator=generator(0, "speed samples"))[:_SAMPLES]]
    return Forget.samples({_CLIENT: chosen.tolist()})


def _time_request(
    model: nn.Module, federation: Federation, centroids: Centroids, request: Forget
) -> tuple[float, dict[str, float]]:
    """Median seconds from request to effect, with stored centroids, and the resulting accuracies."""
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
    _cluster_literally(x[cells[0]])  # loads its library
    started = time.perf_counter()
    clusters = [_cluster_literally(x[rows]) for rows in cells]
    clustered = time.perf_counter()
    labels = torch.cat([y[rows[:1]].expand(len(centers)) for rows, centers in zip(cells, clusters, strict=True)])
    head = model.get_submodule("head")
    fitted = _fit_literally(head, torch.cat(clusters), labels)
    times = {"clustering_s": clustered - started, "fit_s": time.perf_counter() - clustered}
    return times | retain_and_forget(nn.Sequential(fitted, head), federation, request)


def _cluster_literally(points: Tensor) -> Tensor:
    """The best of five K-means runs for a cell, each until nothing changes."""
    from sklearn.cluster import KMeans

    k = centroid_count(len(points), RATIO)
    runs = KMeans(k, init="random", n_init=5, max_iter=100, tol=0.0, random_state=0).fit(points.numpy())
    return torch.from_numpy(runs.cluster_centers_)


def _fit_literally(head: nn.Module, centroids: Tensor, labels: Tensor) -> Bottleneck:
    """Fifty epochs of SGD in batches of ten; the paper does not state its learning rate."""
    config, source = FilterConfig(), generator(0, "literal filter")
    width, alpha = centroids.shape[1], config.alpha
    fitted = Bottleneck(width, config.rank_for(width), nonnegative=True, source=source)
    optimizer = torch.optim.SGD(fitted.parameters(), lr=0.01)
    for _ in range(50):
        for batch in torch.randperm(len(centroids), generator=source).split(10):
            passed = fitted(centroids[batch])
            loss = alpha * cross_entropy(head(passed), labels[batch]) + (1 - alpha) * mse_loss(passed, centroids[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fitted.eval().requires_grad_(False)


def _peak_ratio(rows: int, width: int) -> float:
    """Peak memory above the level with the features loaded, over the size of the features; NaN without Linux."""
    if not STATUS.exists():
        return float("nan")
    small, small_model = feature_federation(rows=2000, width=width)  # libraries allocate on first use
    unlearn(plug(small_model), collect(small_model, small), Forget.classes([3]), force=True)
    federation, model = feature_federation(rows=rows, width=width)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present level
    level = memory_bytes("VmRSS")
    centroids = collect(model, federation)
    unlearn(plug(model), centroids, Forget.classes([3]), force=True)
    return (memory_bytes("VmHWM") - level) / (rows * width * 4)


def feature_federation(*, rows: int, width: int) -> tuple[Federation, nn.Module]:
    """Overlapping classes, rectified as after a last hidden layer, spread over ten clients by Dirichlet 0.5 (`rows` of
    them trained on), and a model that is only a head."""
    source = torch.Generator().manual_seed(0)
    total = rows * 5 // 4
    y = torch.randint(10, (total,), generator=source)
    means = torch.randn(10, width, generator=source)
    spread = torch.randn(_WITHIN, width, generator=source)
    x = torch.randn(total, _WITHIN, generator=source) @ spread
    x.mul_(0.9).add_(means[y]).relu_()
    federation = Federation.split(x, y, dirichlet(y, 10, seed=0), seed=0, heldout=0.2, validation=0.0)
    return federation, _fitted_head(federation)


def _fitted_head(federation: Federation) -> nn.Module:
    """Ridge regression onto one-hot labels, in closed form; its scale makes the softmax decided."""
    rows = federation.rows("train")
    x, y = federation.x[rows[:10_000]], federation.y[rows[:10_000]]
    mean = x.mean(0)
    centered = (x - mean).double()
    onehot = nn.functional.one_hot(y, federation.num_classes).double()
    penalty = 10 * torch.eye(x.shape[1], dtype=torch.float64)
    weight = 12 * torch.linalg.solve(centered.T @ centered + penalty, centered.T @ (onehot - onehot.mean(0)))
    head = nn.Linear(x.shape[1], federation.num_classes)
    with torch.no_grad():
        head.weight.copy_(weight.T.float())
        head.bias.copy_(-(mean @ head.weight.T))
    return nn.Sequential(OrderedDict(relu=nn.ReLU(), head=head)).eval()
