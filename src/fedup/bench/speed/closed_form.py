"""The closed form: requests answered from moments, and what it takes to collect and keep those."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from fedup.bench.speed._many_clients import measure_growth
from fedup.bench.speed._rows import Row, Tell
from fedup.bench.speed._settings import LENET5, RESNET18, Setting, even_jobs
from fedup.bench.speed.clustering import RATIO, feature_federation
from fedup.bench.turns import in_turns
from fedup.clients.collect import collect
from fedup.federation import Client, Federation
from fedup.models.features import FEATURE_BATCH
from fedup.models.views import fingerprint
from fedup.request import Forget
from fedup.serving.plugged import plug
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.moment_store import MomentStore
from fedup.unlearning.plan import Terms
from fedup.unlearning.unlearn import unlearn

WIDTH = 512  # of ResNet-18's features
_ROWS = 50_000  # of made-up features, over ten clients
_REQUESTS = {"client": Forget.clients([0]), "class": Forget.classes([3])}
_GOAL_MS = {"cpu": 60, "cuda": 15}
_REPEATS = 9
# Rows and clients whose moments are collected, on a CPU and on a GPU; and the goal.
_COLLECTED = {RESNET18: ((256, 2), (12_800, 10), 1.15), LENET5: ((10_240, 10), (51_200, 10), None)}


def measure(device: torch.device, tell: Tell) -> Iterator[Row]:
    """Ten clients and ten classes; the growth to many clients comes last."""
    tell("moments of made-up features")
    federation, head = feature_federation(rows=_ROWS, width=WIDTH)
    sent_usually = collect(head, federation, statistics="moments").size_bytes
    store = collect(head, federation, statistics=MomentConfig(by_class="always"))  # so a class request asks nobody
    assert isinstance(store, MomentStore)
    size = {"rows": _ROWS, "width": WIDTH, "clients": len(store.clients), "classes": store.num_classes}
    tell("requests from moments")
    yield from _measure_requests(store, _base(head, device), device, size)
    yield _compare_uploads(sent_usually, head, federation, size)
    yield Row("what a server keeps of ten clients", store.stored_bytes / 1e6, "MB", 25, detail=size)
    for setting, (on_cpu, on_gpu, goal) in _COLLECTED.items():
        tell(f"moments of {setting.title}")
        yield _measure_collecting(setting, on_gpu if device.type == "cuda" else on_cpu, goal, device)
    yield from measure_growth(device, tell)


def _base(head: nn.Module, device: torch.device) -> nn.Module:
    """A ResNet-18 with this last layer."""
    base = RESNET18.build(device).eval()
    base.get_submodule("head").load_state_dict(head.get_submodule("head").state_dict())
    return base


def _measure_requests(store: MomentStore, base: nn.Module, device: torch.device, size: dict[str, int]) -> Iterator[Row]:
    """From plan to swap; each request meets a model of its own that was plugged before."""
    store.base = fingerprint(base)
    plugs = iter([plug(base) for _ in range((1 + _REPEATS) * len(_REQUESTS))])

    def answer(request: Forget) -> None:
        unlearn(next(plugs), store, request, terms=Terms(measure=False))

    times = in_turns({kind: partial(answer, request) for kind, request in _REQUESTS.items()}, device, repeats=_REPEATS)
    for kind in _REQUESTS:
        name, goal = f"{kind} request from moments, ResNet-18", _GOAL_MS[device.type]
        yield Row(name, 1000 * times.median(kind), "ms", goal, detail=size)


def _compare_uploads(moments_bytes: int, model: nn.Module, federation: Federation, size: dict[str, int]) -> Row:
    centroids_bytes = collect(model, federation, statistics=CentroidConfig(RATIO)).size_bytes
    sent = {"moments_bytes": moments_bytes, "centroids_bytes": centroids_bytes, "ratio": RATIO}
    return Row("moments sent, over centroids", moments_bytes / centroids_bytes, "×", 1, detail=size | sent)


def _measure_collecting(setting: Setting, count: tuple[int, int], goal: float | None, device: torch.device) -> Row:
    """All clients one after another, against a bare forward pass over the same batches."""
    rows, clients = count
    (x, y), model = setting.data(rows, device), setting.build(device).eval()
    parts = [job.rows.to(device) for job in even_jobs(rows, clients, setting.local(device))]
    nothing = parts[0][:0]
    federation = Federation(
        x, y, tuple(Client(i, own, nothing, nothing) for i, own in enumerate(parts)), setting.classes
    )

    @torch.no_grad()
    def forward() -> None:
        for own in parts:
            for batch in own.split(FEATURE_BATCH):
                model(x[batch])

    def moments() -> None:
        collect(model, federation, statistics="moments")

    repeats = 7 if device.type == "cuda" else 3
    times = in_turns({"collect": moments, "forward": forward}, device, repeats=repeats)
    detail = {"rows": rows, "clients": clients, "batch": FEATURE_BATCH, **times.medians()}
    name = f"{setting.title}: collecting moments, over a bare forward pass"
    return Row(name, times.ratio("collect", "forward"), "×", goal, detail=detail)
