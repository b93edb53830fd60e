"""FedUP makes a federated model forget on request, in seconds, without touching its weights, and remember again.

>>> import torch
>>> from fedup import *
>>> from torch import nn
>>> x, y = torch.randn(400, 16), torch.arange(400) % 4
>>> x[torch.arange(400), y] += 4
>>> federation = Federation.split(x, y, dirichlet(y, 5))
>>> start = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
>>> model = federate(start, federation, rounds=5).model            # 1 learn
>>> centroids = collect(model, federation)                         # 2 once
>>> plugged = plug(model)
>>> report = unlearn(plugged, centroids, Forget.clients([3]))      # 3 at the server, no client involved
>>> logits = plugged(x)                                            # 4 forgotten
>>> with plugged.restored():
...     torch.equal(plugged(x), model(x))                          #   and remembered, bit for bit
True
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedup.clients.collect import collect
    from fedup.errors import FedUPError
    from fedup.federation import Federation
    from fedup.filters.bottleneck import FilterConfig
    from fedup.filters.fit import Trace
    from fedup.models.views import fingerprint
    from fedup.partition import dirichlet, iid, pathological
    from fedup.privacy import DP, Budget, Ledger
    from fedup.request import Forget
    from fedup.serving.filter_file import load_filter, save_filter
    from fedup.serving.plugged import PluggedModel, plug
    from fedup.statistics.store import Centroids, load_centroids, save_centroids
    from fedup.training.fedavg import Observer, federate
    from fedup.training.local import LocalTraining
    from fedup.unlearning.plan import RequestPlan, Terms
    from fedup.unlearning.report import Report
    from fedup.unlearning.unlearn import plan, purge, restore, unlearn

__version__ = "0.1.0"

__all__ = [
    "DP",
    "Budget",
    "Centroids",
    "FedUPError",
    "Federation",
    "FilterConfig",
    "Forget",
    "Ledger",
    "LocalTraining",
    "Observer",
    "PluggedModel",
    "Report",
    "RequestPlan",
    "Terms",
    "Trace",
    "collect",
    "dirichlet",
    "federate",
    "fingerprint",
    "iid",
    "load_centroids",
    "load_filter",
    "pathological",
    "plan",
    "plug",
    "purge",
    "restore",
    "save_centroids",
    "save_filter",
    "unlearn",
]

# Where each name lives. Loaded on first use, so that a command that needs no torch starts at once.
_HOME = {
    "Budget": "fedup.privacy",
    "DP": "fedup.privacy",
    "Ledger": "fedup.privacy",
    "Centroids": "fedup.statistics.store",
    "FedUPError": "fedup.errors",
    "Federation": "fedup.federation",
    "FilterConfig": "fedup.filters.bottleneck",
    "Forget": "fedup.request",
    "LocalTraining": "fedup.training.local",
    "Observer": "fedup.training.fedavg",
    "PluggedModel": "fedup.serving.plugged",
    "Report": "fedup.unlearning.report",
    "RequestPlan": "fedup.unlearning.plan",
    "Terms": "fedup.unlearning.plan",
    "Trace": "fedup.filters.fit",
    "collect": "fedup.clients.collect",
    "dirichlet": "fedup.partition",
    "federate": "fedup.training.fedavg",
    "fingerprint": "fedup.models.views",
    "iid": "fedup.partition",
    "load_centroids": "fedup.statistics.store",
    "load_filter": "fedup.serving.filter_file",
    "pathological": "fedup.partition",
    "plan": "fedup.unlearning.unlearn",
    "plug": "fedup.serving.plugged",
    "purge": "fedup.unlearning.unlearn",
    "restore": "fedup.unlearning.unlearn",
    "save_centroids": "fedup.statistics.store",
    "save_filter": "fedup.serving.filter_file",
    "unlearn": "fedup.unlearning.unlearn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedup' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
