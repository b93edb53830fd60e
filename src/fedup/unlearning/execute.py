"""An answer to requests, from centroids to a filter that is served: built, checked for harm, measured, and only then in
force."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from fedup.clients.protocol import Contact
from fedup.clients.tally import TallyQuestion
from fedup.errors import HarmError, RequestError, SettingError
from fedup.filters.bottleneck import DEFAULT_RANK, FilterConfig
from fedup.filters.eraser import PlacedEraser
from fedup.filters.fit import Trace
from fedup.models.cut import flat_tail
from fedup.models.views import shared_view
from fedup.request import Forget, union
from fedup.serving.plugged import PluggedModel, Served
from fedup.statistics.store import Cell, Centroids
from fedup.statistics.tally import RowsToCount, Tally
from fedup.unlearning.bottleneck_fit import fit_bottleneck, used_cells
from fedup.unlearning.class_recall import (
    Recall,
    check_classes_left,
    check_recall,
    recall_from_tallies,
    recall_on_vectors,
)
from fedup.unlearning.eraser_builder import EraserBuilder
from fedup.unlearning.refresh import Refresh
from fedup.unlearning.report import Report
from fedup.unlearning.verdict import Verdict, class_part, judge, not_measured, rows_part

_BROKEN = 0.5  # of the usual recall
_ALPHAS = (1.0, 1.0, 1.0, 0.3, 0.1)  # of the weight of labels, in each try of a fit
_MORE_STEPS = 3  # times as many, for features to stay as they are
_WIDER = (2, 4)  # times the usual rank, where a bottleneck costs a class too much on rows held out:
_CLOSE = 0.7  # more than so much of what is allowed
_GENTLEST = (0.1, 0.03)  # where samples are withdrawn and nothing sets them apart: all is to stay as it is
FARTHER = (
    "The filter that can be made would make the model know these samples better than before, so it is withheld: the "
    "request stays open, and its rows are left out of all centroids and of later rounds. What helps is more "
    "training without them, or retraining; force=True serves the filter all the same."
)


@dataclass(frozen=True)
class Terms:
    """On which terms a filter may be served.

    A class that nobody asked to forget may lose `max_class_loss` points of its recall on retained rows; with `force`
    more, and withdrawn samples that come out better known than before are served, too. `measure` says whether clients
    count answers for a verdict; None: where that costs little, or they are asked anyway.
    """

    force: bool = False
    max_class_loss: float = 5.0
    measure: bool | None = None
    keep_sealed: bool = False

    def __post_init__(self) -> None:
        if not self.max_class_loss >= 0:  # NaN would allow everything
            raise SettingError(f"max_class_loss, in points of recall, must be 0 or more; found {self.max_class_loss}.")


Counted = tuple[Served, Mapping[int, Tally]]  # what clients counted, of one candidate


@dataclass(frozen=True)
class _Tried:
    """A filter that may be served, and what is known of it."""

    loss: float  # points that the worst class loses
    served: Served
    recalls: dict[int, Recall]
    centroids_used: int
    counted: Counted | None


class Execution:
    """Answers requests with one model, one store and one way to reach clients."""

    def __init__(
        self,
        plugged: PluggedModel,
        centroids: Centroids,
        contact: Contact | None,
        config: FilterConfig,
        terms: Terms,
        report: Report,
        trace: Trace | None = None,
    ) -> None:
        self._plugged, self._centroids, self._contact = plugged, centroids, contact
        self._config, self._terms, self._report, self._trace = config, terms, report, trace
        self._counted: Counted | None = None
        self._classes_lost = False  # and known to be, by force

    def answer(self, active: frozenset[Forget], new: frozenset[Forget]) -> None:
        """Serve a filter for the active requests and the new ones; what may not be served is refused, or stays open."""
        store, report, before = self._centroids, self._report, self._plugged.served
        original = _copy(store) if len(new) > 1 and self._measures(new) else None
        refresh = Refresh(store, self._contact, report, keep_sealed=self._terms.keep_sealed)
        with refresh.undone_on_error(), self._plain():
            candidate = self.build(active | new, refresh, checked_against=active)
            while True:
                report.verdicts |= {
                    request.digest: self._verdict(request, active, new, candidate, original) for request in new
                }
                farther = frozenset(request for request in new if self._is_withheld(request))
                if not farther:
                    break
                report.withheld |= farther
                new -= farther
                if not new:
                    report.class_recall = {}  # that of a filter that is not served
                    break
                refresh.leave_open(farther)
                candidate = self.build(active | new, None)
            self._settle(active | new, candidate if new or not report.withheld else before, report.withheld)

    def _settle(self, requests: frozenset[Forget], candidate: Served | None, withheld: frozenset[Forget]) -> None:
        report, store = self._report, self._centroids
        with report.stage("swap"):
            if candidate is not None and candidate is not self._plugged.served:
                self._plugged.serve(candidate)
        report.requests = requests
        report.erasure = candidate.erasure.about if candidate is not None and candidate.erasure is not None else None
        store.open = {request for request in store.open if request not in requests} | withheld
        if withheld:
            report.note(FARTHER, withheld)

    # --- a candidate

    def build(
        self, requests: frozenset[Forget], refresh: Refresh | None, checked_against: frozenset[Forget] | None = None
    ) -> Served:
        """A filter for these requests that harms no class, from cells that leave out what they name."""
        store, report, config = self._centroids, self._report, self._config
        gone, left_out = union(requests), union([*requests, *store.open])
        used = used_cells(store, gone, config)
        if refresh is not None:
            with report.stage("contact"):
                refresh.touched(used, left_out)  # of which classes the samples are
                self._check_classes_left(left_out, checked_against)
                refresh.bring_up_to_date(used, left_out)
                self._check_classes_left(left_out, checked_against)  # cells that were purged are known now
        erasing = EraserBuilder(self._plugged.base, self._plugged.cut, config, self._contact, report, dp=store.dp)
        served = self._plugged.served
        erasure = erasing.erasure_for(
            requests, left_out, served.question if served else None, served.erasure if served else None
        )
        tried = self._tried(requests, used, gone, erasing, erasure)
        chosen = min(tried, key=lambda one: one.loss)
        if self._terms.force and chosen.loss > self._terms.max_class_loss:
            chosen = tried[0]
        report.class_recall, report.centroids_used, self._counted = (
            chosen.recalls,
            chosen.centroids_used,
            chosen.counted,
        )
        self._allow(lambda: check_recall(chosen.recalls, gone, max_class_loss=self._terms.max_class_loss))
        self._note_choice(tried[0].served, chosen.served, used, gone)
        return chosen.served

    def _tried(
        self,
        requests: frozenset[Forget],
        used: list[Cell],
        gone: Forget,
        erasing: EraserBuilder,
        erasure: PlacedEraser | None,
    ) -> list[_Tried]:
        """Filters of every kind that may answer, until one costs no class much; where all come close to what is
        allowed, the last kind again with a wider bottleneck: rows held out may show a loss that centroids of rows
        learned by heart do not."""
        tried: list[_Tried] = []
        allowed = self._terms.max_class_loss
        kinds = [(*kind, 1) for kind in self._kinds(gone, erasure, complete=erasing.complete)]
        wider = [(*kinds[-1][:2], times) for times in self._wider() if kinds[-1][1] and self._widens(requests)]
        for with_eraser, with_bottleneck, times in [*kinds, *wider]:
            if times > 1 and min(one.loss for one in tried) <= _CLOSE * allowed:
                break
            candidate = self._fitted(
                requests, used, gone, erasure if with_eraser else None, times if with_bottleneck else 0
            )
            candidate = replace(candidate, question=erasing.question)
            with self._report.stage("check"):
                recalls = self._recall(candidate, used, gone, requests)
            loss = max((one.loss for label, one in recalls.items() if label not in gone.class_ids), default=0.0)
            tried.append(_Tried(loss, candidate, recalls, self._report.centroids_used, self._counted))
            if loss <= allowed / 2:
                break
        return tried

    def _wider(self) -> list[int]:
        """How many times the usual rank gives a wider bottleneck each time."""
        ranks = {self._rank(times): times for times in reversed(_WIDER)}
        return sorted(times for rank, times in ranks.items() if rank > self._rank(1))

    def _rank(self, times: int) -> int:
        return min(times * DEFAULT_RANK, math.prod(self._centroids.shape))

    def _widens(self, requests: frozenset[Forget]) -> bool:
        """Whether a wider bottleneck may be tried: nobody chose one, and clients count what it does."""
        config = self._config
        return config.rank is None and config.gentle and self._measures(requests - self._plugged.requests)

    def _kinds(self, gone: Forget, erasure: PlacedEraser | None, *, complete: bool) -> list[tuple[bool, bool]]:
        """(eraser, bottleneck) in the order in which they are tried: by default an eraser for samples, with a
        bottleneck where the request names more, or where the eraser alone harms a class; without the eraser where it
        harms and the samples are merely withdrawn (docs/cuts_and_erasure.md has the figures)."""
        if self._config.filter != "auto":
            return [(erasure is not None, self._config.filter != "erasure")]
        if erasure is None:
            return [(False, True)]
        kinds = [(True, True)] if not complete or gone.client_ids or gone.class_ids else [(True, False), (True, True)]
        return kinds if gone.reason == "poison" or self._terms.force else [*kinds, (False, True)]

    def _fitted(
        self,
        requests: frozenset[Forget],
        used: list[Cell],
        gone: Forget,
        erasure: PlacedEraser | None,
        times: int,
    ) -> Served:
        """With a bottleneck of so many times the usual rank; 0: none."""
        plugged, report = self._plugged, self._report
        made = Served(None, requests, self._config, plugged.base_fingerprint, plugged.cut, erasure)
        with report.stage("fit"):
            if not times:
                report.centroids_used = 0
                return made
            return self._fit_gently(made, used, gone, times)

    def _fit_gently(self, made: Served, used: list[Cell], gone: Forget, times: int) -> Served:
        """With a bottleneck that costs no class much: where one would lose, it is fitted again with that class drawn
        more often, then with less weight on labels and more on the features as they are; the fit is taken that costs
        the worst class least."""
        emphasis: dict[int, float] = {}
        best: tuple[float, Served] | None = None
        rank = self._config.rank if times == 1 else self._rank(times)
        for share in self._alphas(made, gone):
            longer, epochs = _MORE_STEPS if share < _ALPHAS[-1] + 1e-9 else 1, self._config.epochs
            config = replace(
                self._config,
                alpha=share * self._config.alpha,
                steps=longer * self._config.steps,
                epochs=None if epochs is None else longer * epochs,
                rank=rank,
            )
            fitted, self._report.centroids_used = fit_bottleneck(
                self._plugged,
                self._centroids,
                used,
                gone,
                config,
                trace=self._trace,
                erasure=made.erasure,
                notes=self._report.notes,
                emphasis=emphasis,
            )
            served = replace(made, filter=fitted)
            recalls = {} if self._centroids.dp else self._recall_at_cut(served, used, gone)
            worst = max((recall.loss for recall in recalls.values()), default=0.0)
            if best is None or worst < best[0]:
                best = worst, served
            if worst <= self._terms.max_class_loss / 2:
                break
            for label, recall in recalls.items():
                if recall.loss > self._terms.max_class_loss / 4:
                    emphasis[label] = 2 * emphasis.get(label, 1.0)
        assert best is not None  # there is at least one fit
        return best[1]

    def _alphas(self, made: Served, gone: Forget) -> Sequence[float]:
        """How much labels count in each try."""
        if not self._config.gentle:
            return (1.0,)
        withdrawn = gone.kind == "sample" and gone.reason == "withdrawal" and self._config.filter == "auto"
        return _GENTLEST if withdrawn and made.erasure is None else _ALPHAS

    def _note_choice(self, first: Served, chosen: Served, used: list[Cell], gone: Forget) -> None:
        """Why another filter than the usual one was taken, and what the usual one does not mend."""
        if chosen is not first and first.filter is not None:
            self._report.note("The usual filter would cost a class more of its recall: another one answers.")
        elif chosen is not first:
            instead = "A bottleneck besides it" if chosen.erasure is not None else "The bottleneck alone"
            self._report.note(f"An eraser alone would cost a class more of its recall. {instead} answers the request.")
        if chosen.erasure is not None and chosen.filter is None:
            self._note_broken_classes(used, gone)

    # --- harm

    def _check_classes_left(self, left_out: Forget, active: frozenset[Forget] | None) -> None:
        """Refuse what would lose a class that is still there under the active requests."""
        if active is not None and not self._classes_lost:
            before = union([*active, *self._centroids.open])
            forced = len(self._report.forced)
            self._allow(lambda: check_classes_left(self._centroids, left_out, before))
            self._classes_lost = len(self._report.forced) > forced

    def _recall(
        self, candidate: Served, used: list[Cell], gone: Forget, requests: frozenset[Forget]
    ) -> dict[int, Recall]:
        store, new = self._centroids, requests - self._plugged.requests
        behind = any(cut != self._plugged.cut for cut, _ in candidate.placed)  # an eraser: centroids do not see it
        if store.dp is not None or (behind and self._contact is None):
            if candidate.erasure is not None:
                self._allow(self._refuse_unchecked)
            return {}
        counted: dict[int, Recall] = {}
        if behind or self._measures(new):
            measured = new if len(new) == 1 and self._measures(new) else frozenset()
            counted = recall_from_tallies(list(self._tallies(candidate, measured).values()))
        uncounted = {cell.label for cell in used} - gone.class_ids - counted.keys()  # their holders are silent
        if not uncounted:
            return counted
        if behind:
            self._allow(self._refuse_unchecked)
            return counted
        return self._recall_at_cut(candidate, used, gone) | counted

    def _refuse_unchecked(self) -> None:
        if self._centroids.dp is not None:
            raise HarmError(
                "Under differential privacy nobody can be asked what an eraser does to each class, so it is not served "
                "unless you say so with force=True. Nothing was changed."
            )
        if self._contact is not None:
            raise HarmError(
                "Only clients can tell what an eraser does to each class, and none of them counted answers. Nothing "
                "was changed. Ask again later, or serve it unchecked with force=True."
            )
        raise HarmError(
            "Only clients can tell what an eraser does to each class, and there is no way to reach them. Nothing was "
            "changed. Pass clients=federation (on the command line, have the data set here), or serve it unchecked "
            "with force=True."
        )

    def _recall_at_cut(self, served: Served, used: list[Cell], gone: Forget) -> dict[int, Recall]:
        """On retained centroids, of what acts at their cut."""
        store = self._centroids
        rows = store.rows_of([cell for cell in used if cell.label not in gone.class_ids])
        if served.erasure is not None and served.erasure.cut != self._plugged.cut:
            served = replace(served, erasure=None)
        return recall_on_vectors(
            self._plugged, store, served, store.vectors[rows], store.row_labels()[rows], store.counts[rows]
        )

    def _allow(self, check: Callable[[], None]) -> None:
        """A check that force overrides, and the report tells."""
        try:
            check()
        except HarmError as error:
            if not self._terms.force:
                raise
            self._note_forced(error)

    def _note_forced(self, error: HarmError) -> None:
        self._report.forced.append(str(error).partition(" Nothing was changed")[0])

    # --- verdicts

    def _measures(self, new: Collection[Forget]) -> bool:
        if self._contact is None or self._centroids.dp is not None or self._centroids.ledger.budgets:
            return False
        if self._terms.measure is not None:
            return self._terms.measure
        return self._contact.measures_by_default or any(request.sample_ids for request in new)

    def _verdict(
        self,
        request: Forget,
        active: frozenset[Forget],
        new: frozenset[Forget],
        candidate: Served,
        original: Centroids | None,
    ) -> Verdict:
        if not self._measures(new):
            return not_measured(self._why_not_measured())
        before = self._plugged.served
        if original is not None and len(new) > 1:  # all the others, without this one
            before = self._aside(original).build_from(active | (new - {request}))
        if request.reason == "poison" and request.kind != "class" and not self._labels_carried(request):
            return not_measured("the labels of the rows are not known any more: their cells were purged")
        with self._report.stage("measure"):
            if len(new) == 1 and self._counted is not None and self._counted[0] is candidate:
                tallies = self._counted[1]
            else:
                tallies = self._tallies(candidate, frozenset([request]), before=before, classes=False)
            return judge(request, tallies)

    def _why_not_measured(self) -> str:
        if self._centroids.dp is not None:
            return "under differential privacy nobody counts answers"
        if self._contact is not None and self._centroids.ledger.budgets:
            return "clients have privacy budgets, and counts of answers are under no guarantee"
        if self._contact is None:
            return "no way to reach the clients' rows was given (clients=…)"
        return "measuring was left out (measure=True asks the clients)"

    def _tallies(
        self,
        candidate: Served,
        requests: frozenset[Forget],
        *,
        before: Served | None = None,
        classes: bool = True,
    ) -> Mapping[int, Tally]:
        """What clients count under the candidate, and without these requests."""
        contact, gone = self._contact, union(candidate.requests)
        assert contact is not None  # nothing is measured without
        before = before if before is not None else self._plugged.served
        rows = RowsToCount(
            {name: part for request in requests for name, part in _parts(request).items()},
            gone,
            {request.digest: self._labels_carried(request) for request in requests if request.reason == "poison"},
            classes,
        )
        asked = self._who_counts(requests, gone, classes=classes)
        self._report.clients_counting += asked
        questions = {client: TallyQuestion(before, candidate, rows.to(client)) for client in asked}
        counted = dict(contact.ask(questions, optional=asked))
        for client in asked:
            if client not in counted:
                self._report.note(f"Client {client} counted no answers: {contact.silent[client]}")
        if classes and len(requests) == 1:
            self._counted = candidate, counted
        return counted

    def _who_counts(self, requests: Collection[Forget], gone: Forget, *, classes: bool) -> list[int]:
        named = union(requests)
        holders = {*named.client_ids, *named.sample_ids}
        everyone = classes or named.class_ids or named.reason == "poison"
        clients = self._contact.clients if self._contact is not None else ()
        return [c for c in clients if c in holders or (everyone and c not in gone.client_ids)]

    def _labels_carried(self, request: Forget) -> dict[int, float]:
        """The share of each label among the rows of a request, as the store knows them."""
        store, counts = self._centroids, Counter[int]()
        for cell in store.cells:
            if cell.client in request.client_ids:
                counts[cell.label] += int(store.counts[cell.slot].sum()) + len(store.excluded.get(cell.name, ()))
        for client, ids in request.sample_ids.items():
            if client not in request.client_ids:
                counts.update(store.sample_labels.get(client, {})[i] for i in ids)
        return {label: count / counts.total() for label, count in sorted(counts.items()) if count}

    def _is_withheld(self, request: Forget) -> bool:
        verdict = self._report.verdicts[request.digest]
        if verdict.finding != "farther than before" or request.kind != "sample" or request.reason != "withdrawal":
            return False
        if self._terms.force:
            self._report.forced.append(f"To {request} was answered although it makes the model know them better.")
            return False
        return True

    # --- other sets of requests, on the side

    def _aside(self, store: Centroids) -> "Execution":
        """The same on a copy of a store, whose report is nobody's."""
        quiet = replace(self._terms, force=True)
        aside = Report(frozenset())
        return Execution(self._plugged, _copy(store), self._contact, self._config, quiet, aside)

    def build_from(self, requests: frozenset[Forget]) -> Served | None:
        """A filter for these requests from a store that may be behind; None where there are none."""
        if not requests:
            return None
        refresh = Refresh(self._centroids, self._contact, self._report, keep_sealed=False)
        return self.build(requests, refresh)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """Gradients as a fit needs them; autocast's cached casts would hide its steps."""
        device = self._centroids.vectors.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False):
            yield

    @torch.no_grad()
    def _note_broken_classes(self, used: list[Cell], gone: Forget) -> None:
        """Classes of forgotten samples whose retained centroids the original model gets right far less often than
        others': wrong labels among the samples may have done that, and an eraser does not mend it."""
        store = self._centroids
        if self._config.filter != "auto" or store.dp is not None:
            return
        named = {store.sample_labels[client][i] for client, ids in gone.sample_ids.items() for i in ids}
        rows = store.rows_of(used)
        labels = store.row_labels()[rows]
        tail = flat_tail(shared_view(self._plugged.base, frozen=True), self._plugged.cut, store.shape)
        right = torch.cat([tail(store.vectors[part]).argmax(1) for part in rows.split(1024)]) == labels
        recalls = {label: float(right[labels == label].float().mean()) for label in labels.unique().tolist()}
        usual = statistics.median(recalls.values())
        broken = sorted(label for label in named if recalls.get(label, usual) < _BROKEN * usual)
        if broken:
            self._report.note(
                f"Class {', '.join(map(str, broken))}, as the forgotten samples were labelled, is recognised far less "
                "often than others: their labels may have broken it. A bottleneck besides the eraser (filter both) "
                "mends that."
            )


def _parts(request: Forget) -> dict[str, Forget]:
    """A request's rows, and its classes, which are measured in another way."""
    parts = {rows_part(request): Forget(request.client_ids, frozenset(), request.sample_ids, request.reason)}
    parts[class_part(request)] = Forget(class_ids=request.class_ids)
    return {name: part for name, part in parts.items() if part.kind}


def check_leaves_something(used: list[Cell], gone: Forget) -> None:
    """Raise where no centroid would be left to keep."""
    if not used:
        raise RequestError(f"To {gone} leaves no centroid to keep. Take the model out of service instead.")


def _copy(store: Centroids) -> Centroids:
    return store.to(store.vectors.device)
