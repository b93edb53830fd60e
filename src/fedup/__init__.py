"""FedUP makes a federated model forget on request, in seconds, without touching its weights, and remember again.

>>> import torch
>>> from fedup import *
>>> from torch import nn
>>> x, y = torch.randn(400, 16), torch.arange(400) % 4
>>> x[torch.arange(400), y] += 4
>>> federation = Federation.split(x, y, dirichlet(y, 5))
>>> start = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
>>> model = federate(start, federation, rounds=5).model            # 1 learn
>>> store = collect(model, federation)                             # 2 once
>>> plugged = plug(model)
>>> report = unlearn(plugged, store, Forget.clients([3]))          # 3 at the server, no client involved
>>> logits = plugged(x)                                            # 4 forgotten
>>> with plugged.restored():
...     torch.equal(plugged(x), model(x))                          #   and remembered, bit for bit
True
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedup.clients.collect import collect as collect
    from fedup.errors import FedUPError as FedUPError
    from fedup.federation import Federation as Federation
    from fedup.filters.bottleneck import FilterConfig as FilterConfig
    from fedup.filters.fit import Trace as Trace
    from fedup.filters.ridge_head import HeadRule as HeadRule
    from fedup.models.backbone import Backbone as Backbone
    from fedup.models.backbone import Origin as Origin
    from fedup.models.backbone import with_blank_head as with_blank_head
    from fedup.models.views import fingerprint as fingerprint
    from fedup.partition import dirichlet as dirichlet
    from fedup.partition import iid as iid
    from fedup.partition import pathological as pathological
    from fedup.privacy import DP as DP
    from fedup.privacy import Budget as Budget
    from fedup.privacy import Ledger as Ledger
    from fedup.request import Forget as Forget
    from fedup.serving.filter_file import load_filter as load_filter
    from fedup.serving.filter_file import save_filter as save_filter
    from fedup.serving.plugged import PluggedModel as PluggedModel
    from fedup.serving.plugged import plug as plug
    from fedup.statistics.centroids import CentroidConfig as CentroidConfig
    from fedup.statistics.feature_cache import FeatureCache as FeatureCache
    from fedup.statistics.integer_moments import MomentConfig as MomentConfig
    from fedup.statistics.moment_store import MomentStore as MomentStore
    from fedup.statistics.store import Centroids as Centroids
    from fedup.statistics.store_file import load_centroids as load_centroids
    from fedup.statistics.store_file import save_centroids as save_centroids
    from fedup.subjects import SubjectKey as SubjectKey
    from fedup.training.fedavg import Observer as Observer
    from fedup.training.fedavg import Rounds as Rounds
    from fedup.training.fedavg import Runtime as Runtime
    from fedup.training.fedavg import federate as federate
    from fedup.training.local import LocalTraining as LocalTraining
    from fedup.unlearning.claim import Claim as Claim
    from fedup.unlearning.cohort import CohortModel as CohortModel
    from fedup.unlearning.collect_again import collect_again as collect_again
    from fedup.unlearning.exact import HeadModel as HeadModel
    from fedup.unlearning.exact_file import load_head as load_head
    from fedup.unlearning.exact_file import save_head as save_head
    from fedup.unlearning.learn_head import learn_head as learn_head
    from fedup.unlearning.pending import finish_pending as finish_pending
    from fedup.unlearning.plan import RequestPlan as RequestPlan
    from fedup.unlearning.plan import Terms as Terms
    from fedup.unlearning.report import Report as Report
    from fedup.unlearning.unlearn import plan as plan
    from fedup.unlearning.unlearn import purge as purge
    from fedup.unlearning.unlearn import restore as restore
    from fedup.unlearning.unlearn import unlearn as unlearn

__version__ = "0.1.0"

# Where public names live. Loaded on first use, so that a command that needs no torch starts at once.
_PUBLIC = {
    "fedup.clients.collect": "collect",
    "fedup.errors": "FedUPError",
    "fedup.federation": "Federation",
    "fedup.filters.bottleneck": "FilterConfig",
    "fedup.filters.fit": "Trace",
    "fedup.filters.ridge_head": "HeadRule",
    "fedup.models.backbone": "Backbone Origin with_blank_head",
    "fedup.models.views": "fingerprint",
    "fedup.partition": "dirichlet iid pathological",
    "fedup.privacy": "DP Budget Ledger",
    "fedup.request": "Forget",
    "fedup.serving.filter_file": "load_filter save_filter",
    "fedup.serving.plugged": "PluggedModel plug",
    "fedup.statistics.centroids": "CentroidConfig",
    "fedup.statistics.feature_cache": "FeatureCache",
    "fedup.statistics.integer_moments": "MomentConfig",
    "fedup.statistics.moment_store": "MomentStore",
    "fedup.statistics.store": "Centroids",
    "fedup.statistics.store_file": "load_centroids save_centroids",
    "fedup.subjects": "SubjectKey",
    "fedup.training.fedavg": "Observer Rounds Runtime federate",
    "fedup.training.local": "LocalTraining",
    "fedup.unlearning.claim": "Claim",
    "fedup.unlearning.cohort": "CohortModel",
    "fedup.unlearning.collect_again": "collect_again",
    "fedup.unlearning.exact": "HeadModel",
    "fedup.unlearning.exact_file": "load_head save_head",
    "fedup.unlearning.learn_head": "learn_head",
    "fedup.unlearning.pending": "finish_pending",
    "fedup.unlearning.plan": "RequestPlan Terms",
    "fedup.unlearning.report": "Report",
    "fedup.unlearning.unlearn": "plan purge restore unlearn",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedup' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
