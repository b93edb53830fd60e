"""FedUP makes a federated model forget on request, in seconds, without touching its weights, and remember again.

>>> import torch
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

from fedup.centroids import Centroids, collect, load_centroids, save_centroids
from fedup.client import LocalTraining
from fedup.errors import FedUPError
from fedup.fedavg import Observer, federate
from fedup.federation import Federation
from fedup.filter import FilterConfig
from fedup.filter_file import load_filter, save_filter
from fedup.fit import Trace
from fedup.partition import dirichlet, iid, pathological
from fedup.plug import PluggedModel, plug
from fedup.request import Forget
from fedup.sharing import fingerprint
from fedup.unlearn import Report, purge, restore, unlearn

__version__ = "0.1.0"

__all__ = [
    "Centroids",
    "FedUPError",
    "Federation",
    "FilterConfig",
    "Forget",
    "LocalTraining",
    "Observer",
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
    "plug",
    "purge",
    "restore",
    "save_centroids",
    "save_filter",
    "unlearn",
]
