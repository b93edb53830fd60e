"""FedUP: a filter at the cut, fitted at the server to the centroids of what is retained."""

import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from fedup.bench.cost import Cost
from fedup.bench.methods import AnswersAll
from fedup.bench.settings import borrowed, later, lent
from fedup.bench.task import Task, Unlearned
from fedup.clients.collect import collect, collect_cells
from fedup.clients.in_process import InProcess
from fedup.errors import DataError, HarmError, SettingError
from fedup.filters.bottleneck import DEFAULT_RANK, FilterConfig
from fedup.filters.closed_form import ClosedForm
from fedup.filters.presets import PresetName, preset
from fedup.privacy.guarantee import DP
from fedup.request import Forget
from fedup.serving.plugged import PluggedModel, filtered_view, plug
from fedup.statistics.centroids import CentroidConfig
from fedup.statistics.integer_moments import MomentConfig
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import Centroids
from fedup.unlearning.closed_form_fit import fit_closed_form
from fedup.unlearning.plan import Terms
from fedup.unlearning.report import Report
from fedup.unlearning.unlearn import unlearn

GRID = {"lr": (0.003, 0.001), "steps": (300, 600)}


_FIRST = {
    **{"ratio": 0.8, "sigma": 0.0, "rank": DEFAULT_RANK, "alpha": 0.5, "steps": 300, "batch_size": 128, "lr": 3e-3},
    **{"class_policy": "drop", "guard": True, "weighted": False},
}
_Borrowed: Any = borrowed(DP, CentroidConfig, FilterConfig, first=_FIRST, before={"filter": "bottleneck"})


@dataclass(frozen=True)
class Method(AnswersAll, _Borrowed):  # type: ignore[misc]
    """The settings of the filter, of the centroids, of the guarantee and of the protocol.

    With `cache` clients send centroids of all their data once, before any request; without it, as in the paper, they
    are asked after the request and leave out its data. `preset = "paper"` sets ratio, sigma, cache, class_policy, guard
    and filter as in the paper; `"authors"` as in its authors' code, with optimizer, lr, batch_size and epochs. The
    default `rank` shrinks to the number of features.

    With an `epsilon` clients send statistics under differential privacy; the noise is replayable, so that results can
    be reproduced, and protects nothing: the data are public. `paper_accounting` adds the paper's ε for `sigma`.
    """

    cut: str | None = None
    cache: bool = True
    preset: PresetName = later("default")
    rank: int = later(DEFAULT_RANK)
    epsilon: float = later(0.0)  # none
    clip: str = later("unit")  # or a number
    counted: bool = later(False)  # clients count answers, and what would cost a class too much is the last choice
    second_wave: bool = later(False)  # behind an eraser all clients send moments anew, and the closed form is of these

    def __post_init__(self) -> None:
        self.config(0)  # checks the settings of the filter
        if self.filter == "closed_form" and (self.epsilon or self.sigma):
            raise SettingError("The closed form is made from exact moments: leave epsilon and sigma out.")
        if self.second_wave and self.filter != "closed_form":
            raise SettingError("second_wave is of the closed form: set filter = 'closed_form'.")
        if self.epsilon and (self.sigma or self.paper_accounting):
            raise SettingError("epsilon is a guarantee with its own noise: leave sigma and paper_accounting out.")
        self.statistics(0)  # those of the centroids, or of the guarantee
        preset(self.preset)  # and the name

    def supports(self, request: Forget) -> bool:
        """Any request; a second wave is for samples, which get an eraser."""
        return not self.second_wave or bool(request.sample_ids)

    def config(self, seed: int) -> FilterConfig:
        """The settings of the filter; the default rank counts as not chosen."""
        return lent(self, FilterConfig, seed=seed, rank=None if self.rank == DEFAULT_RANK else self.rank)

    def statistics(self, seed: int) -> CentroidConfig | DP | MomentConfig:
        """What clients send."""
        if self.filter == "closed_form":
            return MomentConfig()
        if not self.epsilon:
            return lent(self, CentroidConfig, seed=seed)
        return lent(self, DP, clip=self.clip if self.clip == "unit" else float(self.clip), replay_seed=seed)

    def unlearn(self, task: Task) -> Unlearned:
        """The original model behind a filter."""
        if self.preset != "default":  # the same with the preset's values in place
            chosen, usual = preset(self.preset, task.request), asdict(FilterConfig())
            settled = {name: value for name, value in asdict(chosen.config).items() if value != usual[name]}
            settled |= {"preset": "default", "ratio": chosen.ratio, "sigma": chosen.sigma, "cache": chosen.cache}
            return replace(self, **settled).unlearn(task)
        cost = Cost()
        cut = self.cut or task.recipe.cut
        centroids = (
            task.collect(statistics=self.statistics(task.recipe.seed), cut=cut, cost=cost)
            if self.cache
            else self._collect_for(task, cut, cost)
        )
        with cost.stage("plug"):
            plugged = plug(task.model, cut)
        report = self._answer(task, plugged, centroids)
        for stage, seconds in report.time_s.items():
            cost.time_s[stage] = cost.time_s.get(stage, 0.0) + seconds
        cost.count(bytes_up=report.bytes_up, bytes_down=report.bytes_down, clients=report.clients_contacted)
        if self.second_wave:
            self._solve_behind_eraser(task, plugged, cost)
        cost.storage_bytes += plugged.served.size_bytes if plugged.served else 0
        about = {
            "did": self._did(report, plugged),
            "erasure": report.erasure,
            "notes": report.notes,
            "expected_loss": {} if self.counted else _expected_loss(report, task.request),
            "privacy": _privacy_of(centroids),
        }
        return Unlearned(plugged, cost, restore=lambda: _unplugged(plugged), about=about)

    def _answer(self, task: Task, plugged: PluggedModel, centroids: Centroids) -> Report:
        """Every filter is served, so that what it does can be measured: where the library would refuse, by force."""
        ask = partial(
            unlearn, plugged, centroids, task.request, clients=task.federation, config=self.config(task.recipe.seed)
        )
        if not self.counted:
            return ask(force=True, terms=Terms(measure=False))  # metrics are the benchmark's own
        with suppress(HarmError):
            report = ask()
            if not report.withheld:
                return report
        return ask(force=True)

    def _solve_behind_eraser(self, task: Task, plugged: PluggedModel, cost: Cost) -> None:
        """A closed form from what retained features are once they have passed the eraser."""
        served = plugged.served
        if served is None or served.erasure is None:
            raise DataError("No eraser was made, so that there is nothing to send moments behind.")
        with cost.stage("second wave"):
            erased = filtered_view(task.model, replace(served, filter=None))
            store = collect(erased, task.retained, statistics=MomentConfig(), cut=served.cut)
            if not isinstance(store, MomentStore):
                raise TypeError("Moments were asked for.")
            plugged.serve(replace(served, filter=fit_closed_form(plugged, store, Forget())))
        cost.count(bytes_up=store.traffic.bytes_up, bytes_down=store.traffic.bytes_down, clients=store.bytes_up)

    def _did(self, report: Report, plugged: PluggedModel) -> str:
        """One line for people."""
        fitted = plugged.served.filter if plugged.served else None
        kind = "an eraser" if report.erasure or fitted is None else f"a filter of rank {fitted.rank}"
        used = "moments" if isinstance(fitted, ClosedForm) else "centroids"
        size = plugged.served.size_bytes if plugged.served else 0
        asked = f"{len(report.clients_contacted)} clients" if report.clients_contacted else "no client"
        return (
            f"{kind} of {size:,} bytes was fitted at the server to {used} of what is retained; {asked} had to "
            "answer after the request, and the weights under it are frozen and still hold what they learned"
        )

    def _collect_for(self, task: Task, cut: str | None, cost: Cost) -> Centroids:
        """The paper's protocol: clients are asked after the request."""
        with cost.stage("collect"):
            centroids = collect_cells(
                task.model,
                InProcess(task.federation, task.model, one_reader=True),
                self.statistics(task.recipe.seed),
                cut,
                frozenset([task.request]),
                with_forgotten=self.class_policy != "drop",
            )
        down = centroids.traffic.bytes_down
        cost.count(bytes_up=centroids.size_bytes, bytes_down=down, clients=centroids.bytes_up)
        return centroids


def _privacy_of(centroids: Centroids) -> dict[str, Any]:
    """The privacy cost of all messages, and the largest upload."""
    counted, ledger = centroids.paper_epsilons, centroids.ledger
    return {
        "mechanism": centroids.how.mechanism,
        "epsilon": max((ledger.epsilon(client, 1e-5) for client in ledger.clients), default=None),
        "paper_epsilon": statistics.fmean(counted.values()) if counted else None,
        "largest_upload": max(centroids.bytes_up.values()),
    }


def _expected_loss(report: Report, request: Forget) -> dict[str, float]:
    """Points of recall that each retained class is expected to lose; for samples clients count."""
    kept = {} if request.sample_ids else report.class_recall
    return {str(label): recall.loss for label, recall in kept.items() if label not in request.class_ids}


def _unplugged(plugged: PluggedModel) -> nn.Module:
    """The unplugged model, made from a second plugged copy: the first is still in use."""
    second = plug(plugged.base, plugged.cut)
    second.serve(plugged.served)
    return second.unplug()
