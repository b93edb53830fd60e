"""Filters measured by the clients: the recall of every class, and a verdict on each request."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedup.clients.biases import BiasesQuestion
from fedup.clients.protocol import Contact
from fedup.clients.question import Question
from fedup.clients.tally import TallyQuestion
from fedup.errors import HarmError
from fedup.filters.eraser import PlacedEraser
from fedup.request import Forget, union
from fedup.serving.plugged import Served
from fedup.statistics.tally import RowsToCount, Tally
from fedup.unlearning.class_recall import Recall, enough_held_out, recall_from_tallies
from fedup.unlearning.fits import Fit
from fedup.unlearning.outvoted import Outvoted, rows_reported_to, weighed, without_single_words
from fedup.unlearning.plan import RequestPlan
from fedup.unlearning.report import Report
from fedup.unlearning.target_fit import TargetFit
from fedup.unlearning.verdict import Verdict, class_part, judge, not_measured

A = TypeVar("A")
Counted = tuple[Served, Mapping[int, Tally]]  # a candidate, and the clients' counts


class UncheckedError(Exception):
    """Nobody can say what an eraser does to a class: all that hold it are absent."""

    def __init__(self, absent: Mapping[int, str]) -> None:
        self.absent = absent  # and why


class Measurement:
    """Measures filters that may be served for a plan's requests."""

    def __init__(self, plan: RequestPlan, report: Report, fit: Fit) -> None:
        self._plan, self._report, self._fit = plan, report, fit
        self.counted: Counted | None = None  # of the last candidate
        self.outvoted: Outvoted | None = None  # the counts of the last candidate's classes, None if nobody counted
        self.trusted: PlacedEraser | None = None  # one that was checked before
        self._few_held_out = True  # of a class: then biases are judged by training rows, too
        self.silent: dict[int, str] = {}  # clients that gave no counts when they were asked, and why
        self.silent_on_biases: dict[int, str] = {}  # those that gave other counts
        self._has_counted = False  # whether clients counted the answers of the last candidate

    @property
    def applies(self) -> bool:
        """Whether clients count answers."""
        plan = self._plan
        if plan.contact is None or plan.centroids.dp is not None or plan.centroids.ledger.budgets:
            return False
        return plan.terms.measure

    @property
    def counts_biases(self) -> bool:
        """Whether clients can say what biases do: they counted the answers of the last candidate, too."""
        return self.applies and self._has_counted

    def recall(self, candidate: Served, forget_set: Forget, new: frozenset[Forget]) -> dict[int, Recall]:
        """By class, on retained rows: by clients if they count or an eraser sits at another cut, else on centroids."""
        plan, self.outvoted, self._has_counted = self._plan, None, False
        behind = any(cut != plan.plugged.cut for cut, _ in candidate.placed)  # an eraser that centroids do not see
        behind |= candidate.erasure is not None and not self._fit.sees_erasers
        behind &= candidate.erasure is None or candidate.erasure is not self.trusted
        behind |= candidate.delta is not None
        if plan.centroids.dp is not None or (behind and plan.contact is None):
            if candidate.erasure is not None:
                plan.allow(self._refuse_unchecked, self._report)
            return {}
        counted: dict[int, Recall] = {}
        if behind or self.applies:
            measured = new if len(new) == 1 and self.applies else frozenset()
            counted = self._counted_recall(candidate, measured)
        used = self._outputs_in_use(forget_set)
        if not used - forget_set.class_ids - counted.keys():  # else holders of a class are silent
            return counted
        if behind:
            self._check_absent(used - forget_set.class_ids - counted.keys())
            plan.allow(self._refuse_unchecked, self._report)
            return counted
        return self._fit.recall(candidate, forget_set) | counted

    def _check_absent(self, uncounted: Collection[int]) -> None:
        """Raise UncheckedError if an eraser is only unchecked because clients are absent, and need not be served."""
        plan, store = self._plan, self._plan.centroids
        if plan.contact is None or plan.force or plan.config.requires_eraser:
            return
        silent, there = {**plan.contact.silent, **self.silent}, set(plan.contact.clients)
        holders = {client for client in store.clients for label in uncounted if store.cell((client, label))}
        absent = {c: silent.get(c, "no node goes by its number") for c in holders if c in silent or c not in there}
        if absent:
            raise UncheckedError(absent)

    def _counted_recall(self, candidate: Served, requests: frozenset[Forget]) -> dict[int, Recall]:
        store, tallies = self._plan.centroids, self._tallies(candidate, requests)
        self._has_counted = bool(tallies)
        heard = self._heard(tallies, candidate)
        self.outvoted = heard.of_outputs(store.num_classes)
        return recall_from_tallies(list(heard.tallies.values()), store.targets, store.num_classes)

    def losses_with(self, served: Served, biases: Sequence[Tensor]) -> Tensor:
        """The points of recall that each class loses under a filter with each of these biases, as clients count it; NaN
        for a class of which nobody counts a row. (V, K)

        Training rows are counted as long as too few held-out rows were.
        """
        store, forget_set = self._plan.centroids, union(served.requests)
        contact = self._plan.contact
        assert contact is not None  # `counts_biases` said so
        rows = RowsToCount({}, store.left_out(served.requests), {}, True, (), finished=store.finished.class_ids)
        vectors = tuple(tuple(bias.tolist()) for bias in biases)
        clients = [c for c in self._who_counts([], forget_set, classes=True) if c not in self.silent_on_biases]
        questions = {client: BiasesQuestion(served, rows.to(client), vectors, self._few_held_out) for client in clients}
        counted = self._answers(contact, questions, self.silent_on_biases)
        losses = torch.full((len(biases), store.num_classes), torch.nan, dtype=torch.float64)
        for place, own in enumerate(losses):
            heard = self._heard({client: hits.tally(place) for client, hits in counted.items()}, served)
            for label, recall in recall_from_tallies(
                list(heard.tallies.values()), "classes", store.num_classes
            ).items():
                own[label] = recall.loss
        self._few_held_out = _have_few_held_out(heard.tallies)
        return losses

    def _heard(self, tallies: Mapping[int, Tally], served: Served) -> Outvoted:
        """Counts under a filter as far as they are believed."""
        reported, allowed = partial(rows_reported_to, self._plan.centroids), self._plan.terms.max_class_loss
        may_go = union(served.requests).class_ids
        return without_single_words(weighed(tallies, reported), reported, allowed, may_go)

    def _outputs_in_use(self, forget_set: Forget) -> set[int]:
        """The classes that retained clients hold; with other targets all outputs."""
        store = self._plan.centroids
        if store.targets != "classes":
            return set(range(store.num_classes))
        return store.classes_held(without=forget_set.client_ids)

    def verdict(self, request: Forget, candidate: Served, before: Served | None, *, alone: bool) -> Verdict:
        """The verdict on a request under the candidate, compared with the filter `before`; if it is the only new one
        (`alone`), clients may have counted already."""
        targets = self._plan.centroids.targets
        if request.reason == "poison" and request.kind != "class" and targets != "classes":
            return not_measured(f"the effect of poisoned {targets} is not defined; look at the figures")
        if request.reason == "poison" and request.kind != "class" and not self._labels_carried(request):
            return not_measured("the labels of the rows are not known any more: their cells were purged")
        with self._report.stage("measure"):
            if alone and self.counted is not None and self.counted[0] is candidate:
                tallies = self.counted[1]
            else:
                tallies = self._tallies(candidate, frozenset([request]), before=before, classes=False)
            return judge(request, tallies, targets)

    def no_verdict(self) -> Verdict:
        """Why nothing is measured."""
        plan = self._plan
        if plan.centroids.dp is not None:
            return not_measured("under differential privacy nobody counts answers")
        if plan.contact is not None and plan.centroids.ledger.budgets:
            return not_measured("clients have privacy budgets, and counts of answers are under no guarantee")
        if plan.contact is None:
            return not_measured("no way to reach the clients' rows was given (clients=…)")
        return not_measured("measuring was left out (terms=Terms(measure=False))")

    def _tallies(
        self, candidate: Served, requests: frozenset[Forget], *, before: Served | None = None, classes: bool = True
    ) -> Mapping[int, Tally]:
        """The clients' counts under the candidate and without these requests."""
        contact, forget_set = self._plan.contact, union(candidate.requests)
        assert contact is not None  # it applies, or an eraser needs it
        parts = {name: part for request in requests for name, part in _parts(request).items()}
        poisoned = [request for request in requests if request.reason == "poison"]
        carried, deviations = {request.digest: self._labels_carried(request) for request in poisoned}, ()
        if isinstance(self._fit, TargetFit):
            carried, deviations = {}, tuple(self._fit.statistics(forget_set).deviations.tolist())
        store = self._plan.centroids
        left_out, finished = store.left_out(candidate.requests), store.finished.class_ids
        rows = RowsToCount(parts, left_out, carried, classes, deviations, finished=finished)
        clients = self._who_counts(requests, forget_set, classes=classes)
        self._report.clients_counting += clients
        before = before if before is not None else self._plan.plugged.served
        questions = {client: TallyQuestion(before, candidate, rows.to(client)) for client in clients}
        tallies = self._answers(contact, questions, self.silent)
        if classes and len(requests) == 1:
            self.counted = candidate, tallies
        return tallies

    def _who_counts(self, requests: Collection[Forget], forget_set: Forget, *, classes: bool) -> list[int]:
        named = union(requests)
        holders = {*named.client_ids, *named.sample_ids}
        everyone = classes or named.class_ids or named.reason == "poison"
        clients = self._plan.contact.clients if self._plan.contact is not None else ()
        finished = self._plan.centroids.finished.client_ids
        counting = [c for c in clients if c in holders or (everyone and c not in forget_set.client_ids)]
        return [client for client in counting if client not in finished and client not in self.silent]

    def _answers(self, contact: Contact, questions: Mapping[int, Question[A]], silent: dict[int, str]) -> dict[int, A]:
        """The clients' answers. One that gives none is silent, and not asked again: it would hold up each filter that
        is tried and each step to better biases, or use up the refusals that its rules allow it."""
        answers = dict(contact.ask(questions, optional=questions))
        for client in questions.keys() - answers.keys():
            silent[client] = contact.silent[client]
            self._report.note(f"Client {client} counted no answers: {silent[client]}")
        return answers

    def _labels_carried(self, request: Forget) -> dict[int, float]:
        """The share of each label among the rows of a request, as far as the store knows."""
        store, counts = self._plan.centroids, Counter[int]()
        for cell in (cell for client in request.client_ids for cell in store.cells_of(client)):
            counts[cell.label] += store.rows_in(cell) + len(store.excluded.get(cell.name, ()))
        for client, ids in request.sample_ids.items():
            if client not in request.client_ids:
                known = store.sample_labels.get(client, {})
                labels = (known[i] for i in ids if i in known)
                counts.update(label for label in labels if label not in store.finished.class_ids)
        return {label: count / counts.total() for label, count in sorted(counts.items()) if count}

    def _refuse_unchecked(self) -> None:
        if self._plan.centroids.dp is not None:
            raise HarmError(
                "Under differential privacy nobody can be asked what an eraser does to each class, so it is not served "
                "unless you say so with force=True. Nothing was changed."
            )
        why, advice = "none of them counted answers", "Ask again later"
        if self._plan.contact is None:
            why = "there is no way to reach them"
            advice = "Pass clients=federation (on the command line, have the data set here)"
        raise HarmError(
            f"Only clients can tell what an eraser or a delta does to each class, and {why}. Nothing was changed. "
            f"{advice}, or serve it unchecked with force=True."
        )


def _have_few_held_out(tallies: Mapping[int, Tally]) -> bool:
    """Whether too few held-out rows of a class were counted that has training rows."""
    held_out = Counter[int]()
    for tally in tallies.values():
        held_out.update({label: paired.rows for label, paired in tally.held_out.items()})
    return any(not enough_held_out(held_out[label]) for tally in tallies.values() for label in tally.retained)


def _parts(request: Forget) -> dict[str, Forget]:
    """A request's rows, and apart from them its classes, which are measured differently."""
    parts = {request.digest: Forget(request.client_ids, frozenset(), request.sample_ids, request.reason)}
    parts[class_part(request)] = Forget(class_ids=request.class_ids)
    return {name: part for name, part in parts.items() if part.kind}
