"""A delta: a small change of weights, fitted by the clients that hold the withdrawn rows."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from fedup.bench.cost import Cost
from fedup.bench.task import Task, Unlearned
from fedup.errors import ContactError, HarmError, RequestError
from fedup.filters.bottleneck import FilterConfig
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, plug
from fedup.statistics.integer_moments import MomentConfig
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import unlearn


@dataclass(frozen=True)
class Method:
    """The library's own call with `filter="delta"`, its checks and its verdict included.

    Where the library serves nothing, the original model stays, and is measured. With `force` every delta is served that
    clients can fit.
    """

    cut: str | None = None
    force: bool = False

    def supports(self, request: Forget) -> bool:
        """Withdrawn rows and clients; a class beside them gets a filter as well."""
        return request.reason == "withdrawal" and bool(request.client_ids or request.sample_ids)

    def unlearn(self, task: Task) -> Unlearned:
        """The original model with changed weights in a view."""
        cost, cut = Cost(), self.cut or task.recipe.cut
        store = task.collect(statistics=MomentConfig(), cut=cut, cost=cost)
        with cost.stage("plug"):
            plugged = plug(task.model, cut)
        config = FilterConfig(filter="delta", seed=task.recipe.seed)
        try:
            report = unlearn(plugged, store, task.request, clients=task.federation, config=config, force=self.force)
        except (RequestError, HarmError, ContactError) as error:
            return _nothing_served(task, cost, str(error))
        for stage, seconds in report.time_s.items():
            cost.time_s[stage] = cost.time_s.get(stage, 0.0) + seconds
        cost.count(bytes_up=report.bytes_up, bytes_down=report.bytes_down, clients=report.clients_contacted)
        if plugged.served is None:
            return _nothing_served(task, cost, " ".join(report.notes))
        cost.storage_bytes += plugged.served.size_bytes
        about: dict[str, Any] = {"did": _did(report, plugged), "notes": report.notes, **_verdict(report, task.request)}
        about["privacy"] = {"largest_upload": max(report.traffic.by_client.values(), default=0)}
        return Unlearned(plugged, cost, restore=lambda: _unplugged(plugged), about=about)


def _nothing_served(task: Task, cost: Cost, why: str) -> Unlearned:
    """The original model, and why."""
    about = {"did": "nothing was served, and the original model stays", "notes": [why]}
    return Unlearned(task.model, cost, restore=lambda: task.model, about=about)


def _did(report: Report, plugged: PluggedModel) -> str:
    """One line for people."""
    size = plugged.served.size_bytes if plugged.served else 0
    asked = len(report.clients_contacted)
    if not size:
        return "nothing had to change: the forgotten rows look unseen already"
    return (
        f"{asked} client{'' if asked == 1 else 's'} fitted a change of weights of {size:,} bytes, which is served over "
        "the base; the weights under it are frozen and still hold what they learned"
    )


def _verdict(report: Report, request: Forget) -> dict[str, str]:
    verdict = report.verdicts.get(request.digest)
    return {"verdict": verdict.finding} if verdict else {}


def _unplugged(plugged: PluggedModel) -> nn.Module:
    """The unplugged model, made from a second plugged copy: the first is still in use."""
    second = plug(plugged.base, plugged.cut)
    second.serve(plugged.served)
    return second.unplug()
