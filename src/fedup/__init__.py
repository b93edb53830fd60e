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
    from fedup.centroids import Centroids, load_centroids, save_centroids
    from fedup.collecting import collect
    from fedup.errors import FedUPError
    from fedup.fedavg import Observer, federate
    from fedup.federation import Federation
    from fedup.filter import FilterConfig
    from fedup.filter_file import load_filter, save_filter
    from fedup.fit import Trace
    from fedup.partition import dirichlet, iid, pathological
    from fedup.plugging import PluggedModel, plug
    from fedup.privacy import DP, Budget, Ledger
    from fedup.report import Report
    from fedup.request import Forget
    from fedup.sharing import fingerprint
    from fedup.training import LocalTraining
    from fedup.unlearning import Plan, plan, purge, restore, unlearn

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
    "Plan",
    "PluggedModel",
    "Report",
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
    "Centroids": "fedup.centroids",
    "FedUPError": "fedup.errors",
    "Federation": "fedup.federation",
    "FilterConfig": "fedup.filter",
    "Forget": "fedup.request",
    "LocalTraining": "fedup.training",
    "Observer": "fedup.fedavg",
    "PluggedModel": "fedup.plugging",
    "Plan": "fedup.unlearning",
    "Report": "fedup.report",
    "Trace": "fedup.fit",
    "collect": "fedup.collecting",
    "dirichlet": "fedup.partition",
    "federate": "fedup.fedavg",
    "fingerprint": "fedup.sharing",
    "iid": "fedup.partition",
    "load_centroids": "fedup.centroids",
    "load_filter": "fedup.filter_file",
    "pathological": "fedup.partition",
    "plan": "fedup.unlearning",
    "plug": "fedup.plugging",
    "purge": "fedup.unlearning",
    "restore": "fedup.unlearning",
    "save_centroids": "fedup.centroids",
    "save_filter": "fedup.filter_file",
    "unlearn": "fedup.unlearning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedup' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
