"""The plan for a set of requests: made and checked before any client is asked and anything changes."""

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

from fedup.clients.in_process import InProcess
from fedup.clients.protocol import Contact
from fedup.errors import FingerprintError, HarmError, RequestError, SettingError
from fedup.federation import Federation
from fedup.filters.bottleneck import FilterConfig
from fedup.filters.fit import Trace
from fedup.models.cut import find_cut
from fedup.request import Forget, check_known, union
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.moment_store import MomentStore
from fedup.statistics.store import CellName, Centroids
from fedup.targets import check_request
from fedup.unlearning.bottleneck_fit import CellsInUse, cells_in_use
from fedup.unlearning.class_recall import check_classes_left, lost_classes
from fedup.unlearning.closed_form_fit import check_closed_form
from fedup.unlearning.delta_builder import DeltaBuilder, check_delta, tried_by_default
from fedup.unlearning.eraser_builder import EraserBuilder
from fedup.unlearning.moment_refresh import refresh_of
from fedup.unlearning.report import Report


@dataclass(frozen=True)
class Terms:
    """The terms on which a filter is made and served.

    A class that nobody asked to forget may lose `max_class_loss` points of recall on retained rows. With `measure`
    clients that can be reached count answers: for a verdict, and for recall, which is only expected otherwise. Cells
    that clients cluster again are replaced. With `keep_sealed` the old ones are kept aside, so that a restore asks
    nobody unless other samples stay erased. A `trace` records the steps of fits. `refusal` says why a filter with a
    delta may not be served, or None: another one answers then, unless the delta was chosen.
    """

    max_class_loss: float = 5.0
    measure: bool = True
    keep_sealed: bool = False
    trace: Trace | None = None
    refusal: Callable[[Served], str | None] | None = None

    def __post_init__(self) -> None:
        if not self.max_class_loss >= 0:  # NaN would allow everything
            raise SettingError(f"max_class_loss, in points of recall, must be 0 or more; found {self.max_class_loss}.")
        if not isinstance(self.measure, bool):  # None would leave counting out unseen
            raise SettingError(f"measure must be True or False; found {self.measure!r}.")


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """What serving a set of requests takes. Its checks ask no client and change nothing.

    `unlearn`, `restore`, dry runs, run folders and Flower all make this plan, then execute it.
    """

    plugged: PluggedModel
    centroids: Centroids
    requests: frozenset[Forget]  # to be served
    new: frozenset[Forget]  # those of them that no filter answers yet
    contact: Contact | None
    config: FilterConfig
    terms: Terms
    force: bool  # serve a filter that harms a class
    again: frozenset[Forget] = frozenset()  # those of `new` that are served in part: clients had not answered

    @property
    def forget_set(self) -> Forget:
        """The union of the requests."""
        return union(self.requests)

    @property
    def left_out(self) -> Forget:
        """What centroids leave out: the requests, and those that stay open without a filter."""
        return self.centroids.left_out(self.requests)

    # --- statistics

    @cached_property
    def cells_used(self) -> CellsInUse:
        """The cells that the filter is fitted to."""
        return cells_in_use(self.centroids, self.forget_set, self.config)

    @cached_property
    def centroids_kept(self) -> int:
        """Centroids that the filter is fitted to, before clients replace any."""
        return self.cells_used.filled_rows

    @cached_property
    def cells_sealed(self) -> int:
        """Cells that the requests leave out: only a restore uses them."""
        return len(self.centroids.cells_named(self.forget_set))

    # --- questions

    @cached_property
    def cells_asked(self) -> list[CellName]:
        """Cells that clients must cluster again, as far as the server knows."""
        outlook = refresh_of(self.centroids, None, Report(frozenset()), keep_sealed=False)
        touched = outlook.touched(replace(self.cells_used, answered=True), self.left_out, ask=False)
        return [cell.name for _, cells, _ in touched for cell in cells]

    @cached_property
    def samples_asked(self) -> dict[int, frozenset[int]]:
        """By client, samples whose class (and so cell) the server does not know; under DP it never asks."""
        if self.centroids.dp is not None:
            return {}
        known = self.centroids.sample_labels
        unknown = {client: ids - known.get(client, {}).keys() for client, ids in self.left_out.sample_ids.items()}
        return {client: ids for client, ids in unknown.items() if ids}

    @property
    def samples_unknown(self) -> int:
        """The number of these samples."""
        return sum(len(ids) for ids in self.samples_asked.values())

    @property
    def eraser_config(self) -> FilterConfig:
        """The settings of erasers. They compare rows of one class: with other targets there are none."""
        return self.config if self.centroids.targets == "classes" else replace(self.config, filter="bottleneck")

    @property
    def clients_of_eraser(self) -> list[int]:
        """Clients asked for statistics of forgotten and retained rows."""
        return self._eraser[0]

    @cached_property
    def _eraser(self) -> tuple[list[int], list[str]]:
        report, served = Report(self.requests), self.plugged.served
        builder = EraserBuilder(
            self.plugged.base, self.plugged.cut, self.eraser_config, self.contact, report, store=self.centroids
        )
        sure = replace(self.delta_builder(report), tried=frozenset())  # one that is only tried may not answer
        rest = self.requests - sure.requests_of(self.requests)
        clients = builder.clients_to_ask(rest, self.left_out, served.question if served else None)
        return clients, report.notes

    def delta_builder(self, report: Report) -> DeltaBuilder:
        """What makes deltas for this plan."""
        tried, chosen = frozenset[Forget](), self.config.filter == "delta"
        if self.terms.measure and not self.force:  # force serves the usual filter, whatever it costs
            tried = tried_by_default(self.requests, self.contact, self.centroids, self.config)
        return DeltaBuilder(self.plugged, self.centroids, self.contact, report, chosen=chosen, tried=tried)

    @cached_property
    def clients_of_delta(self) -> list[int]:
        """Clients asked for a change of weights."""
        return self.delta_builder(Report(self.requests)).clients_to_ask(self.requests, self.left_out)

    @property
    def clients_contacted(self) -> list[int]:
        """All clients that are asked something, other than to count answers."""
        cells = (client for client, _ in self.cells_asked)
        return sorted({*self.samples_asked, *cells, *self.clients_of_eraser, *self.clients_of_delta})

    @property
    def charges(self) -> Counter[int]:
        """By client, the number of answers that count against its privacy budget."""
        cells = dict.fromkeys([*(client for client, _ in self.cells_asked), *self.samples_asked])
        return Counter([*cells, *self.clients_of_eraser])

    @property
    def notes(self) -> list[str]:
        """Notes for people."""
        return self._eraser[1]

    # --- checks

    def allow(self, check: Callable[[], None], report: Report) -> None:
        """Run a check; with force its failure goes into the report."""
        try:
            check()
        except HarmError as error:
            if not self.force:
                raise
            report.forced.append(str(error).partition(" Nothing was changed")[0])

    def check(self) -> None:
        """Refuse all that can be refused before a client is asked."""
        plugged, store = self.plugged, self.centroids
        check_belongs(plugged, store, self.requests)
        check_request(self.forget_set, store.targets)
        check_known(self.forget_set, clients=store.known_clients, num_classes=store.num_classes)
        self._check_bottleneck()
        check_delta(plugged, store, self.config)
        if self.config.eraser_cut != "auto":
            find_cut(plugged.base, self.config.eraser_cut)  # or a later request would meet the wrong name
        self._check_ledger()
        if not self.cells_used:
            raise RequestError(f"To {self.forget_set} leaves nothing to keep. Take the model out of service instead.")
        if self.contact is not None:
            self._check_charges(self.contact)
        if not self.force:
            before = store.left_out(plugged.requests)
            waiting = lost_classes(store, before).keys()
            if self.contact is None or not store.pending:  # else those that are waited for are asked first
                check_classes_left(store, self.left_out, before, None, waiting)

    def _check_bottleneck(self) -> None:
        """Refuse a bottleneck that cannot be fitted before any client is asked and charged."""
        config, dp = self.config, self.centroids.dp
        if isinstance(self.centroids, MomentStore):
            check_closed_form(self.plugged, config, self.centroids.targets)
            return
        if config.filter == "closed_form":
            raise SettingError(
                "The closed form is made from moments, and this store holds centroids: collect with "
                "statistics='moments', or use filter='bottleneck'."
            )
        if not config.wants_bottleneck:
            return
        if config.class_policy == "remap_client" and dp is not None:
            raise SettingError("Under DP clients are added up before they are relabelled: use class_policy='remap'.")
        config.rank_for(math.prod(self.centroids.shape))  # raises if too wide

    def _check_ledger(self) -> None:
        spent = Counter(self.centroids.ledger.charges)
        if spent and self.contact is not None and spent - Counter(self.contact.ledger.charges):
            raise SettingError(
                "The way to reach clients has a ledger that does not know what these centroids cost: make it with "
                "ledger=centroids.ledger."
            )

    def _check_charges(self, contact: Contact) -> None:
        """Refuse an eraser that cannot be made or checked, and answers beyond the clients' budgets."""
        dp, of_eraser = self.centroids.dp, self.clients_of_eraser  # raises where there can be no eraser
        if dp is not None and of_eraser and not self.force:
            raise HarmError(
                "Under differential privacy nobody can be asked what an eraser does to each class, so it is made and "
                "served with force=True only; filter='bottleneck' needs none. Nothing was changed or released."
            )
        if dp is not None:
            contact.ledger.check(list(self.charges.elements()), dp)
        elif self.centroids.ledger.budgets:
            contact.ledger.check_exact(list(self.charges))


def make_plan(
    plugged: PluggedModel,
    centroids: Centroids,
    requests: Collection[Forget],
    clients: Federation | Contact | None,
    config: FilterConfig,
    terms: Terms,
    *,
    force: bool,
) -> RequestPlan:
    """The plan for serving exactly these requests, checked."""
    if isinstance(clients, Federation):  # else the caller has asked it something already
        clients = InProcess(clients, plugged.base, one_reader=True, ledger=centroids.ledger)
    served = frozenset(requests)
    plan = RequestPlan(plugged, centroids, served, served - plugged.requests, clients, config, terms, force)
    plan.check()
    return plan


def check_belongs(plugged: PluggedModel, centroids: Centroids, requests: frozenset[Forget]) -> None:
    """Refuse centroids of another model or cut, or collected for other requests."""
    plugged.check_base()
    if centroids.base != plugged.base_fingerprint or centroids.cut != plugged.cut:
        raise FingerprintError(
            f"The statistics come from base {centroids.base[:12]} at cut {centroids.cut!r}; this model is "
            f"{plugged.base_fingerprint[:12]} at cut {plugged.cut!r}. Collect from this model at this cut."
        )
    missing = centroids.collected_for - requests
    if missing:
        raise RequestError(
            f"These statistics were collected for {', '.join(map(str, missing))}, which is not among the requests to "
            "serve: collect again for the requests that are, or join requests that come together with |."
        )
