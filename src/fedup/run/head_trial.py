"""An answer in exact mode, tried on the model at hand: what it changes, what it costs, and whether it may be served."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fedup.clients.protocol import Contact
from fedup.errors import HarmError
from fedup.federation import Federation
from fedup.filters.closed_form import Scores
from fedup.request import Forget, union
from fedup.run.answer import NewRequest, described_requests
from fedup.run.exact import salt_of
from fedup.run.head_judge import HeadJudge, expected_accuracy, expected_recall, scores_of
from fedup.run.in_words import ids as ids_in_words
from fedup.run.limits import Limits
from fedup.run.state import State
from fedup.unlearning.class_recall import Recall, check_recall
from fedup.unlearning.cohort import CohortModel
from fedup.unlearning.exact import HeadModel
from fedup.unlearning.report import Report

Figures = Mapping[str, Any]
Describe = Callable[[NewRequest], NewRequest]  # checks a request, and says which rows it names


class Before(NamedTuple):
    """A model before a request: which requests it is measured for, its figures, and the hash of its totals."""

    judged: frozenset[Forget]
    figures: Figures | None
    totals: str
    scores: Scores
    answers: dict[str, Any]


@dataclass
class Trial:
    """An answer that was tried: what it would change, and why it may not be put in force."""

    requests: list[dict[str, Any]]
    report: Report
    before: Before
    after: Figures | None
    recalls: dict[int, Recall]
    declined: str | None
    harmed: list[int]

    @property
    def recalls_json(self) -> dict[str, Any]:
        """By class, as plain data."""
        return {str(label): asdict(recall) for label, recall in self.recalls.items()}


@dataclass(frozen=True, eq=False)
class Trials:
    """A model of a run folder, and what it is measured on. The folder itself is never written."""

    model: HeadModel | CohortModel
    state: State
    clients: Federation | Contact | None = None
    judge: HeadJudge | None = None
    describe: Describe = lambda request: request

    def tried(
        self,
        new: Sequence[NewRequest],
        *,
        keep_sealed: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> Trial:
        """The head without what these requests name, measured and served by this model alone: nothing is stored."""
        model = self.model
        new = [self.describe(replace(own, forget=model.resolved(own.forget, self.clients))) for own in new]
        requests, named = described_requests(self.state, new), frozenset(each.forget for each in new)
        before = self.measured(model.requests | named)
        options = {"keep_sealed": keep_sealed} if isinstance(model, HeadModel) else {}
        try:
            report = model.unlearn(named, clients=self.clients, force=limits.force, **options)
        except HarmError as error:
            report = error.report or Report(model.requests)
            return Trial(requests, report, before, None, {}, self._lost(error.classes), error.classes)
        with report.stage("measure"):
            after = self._shares(before.judged)
            recalls = self._recalls(before)
        declined = limits.refusal(_for_limits(before.figures, after, recalls))
        harmed: list[int] = []
        if declined is None and not limits.force:
            try:
                check_recall(recalls, union(before.judged), max_class_loss=limits.max_class_loss)
            except HarmError as error:
                declined, harmed = str(error), error.classes
        return Trial(requests, report, before, after, recalls, declined, harmed)

    def _lost(self, classes: list[int]) -> str:
        named = ids_in_words(classes, names=self.state.about.get("class_names", ()))
        return f"No row would be left of class {named}, which nobody asked to forget. Nothing was changed."

    def measured(self, judged: frozenset[Forget]) -> Before:
        model = self.model
        totals = model.totals_hash(salt_of(self.state))
        answers = self.judge.answers(model, judged) if self.judge else {}
        return Before(judged, self._shares(judged), totals, scores_of(model.head), answers)

    def _shares(self, judged: frozenset[Forget]) -> Figures | None:
        return self.judge.shares(self.model, judged) if self.judge else None

    def _recalls(self, before: Before) -> dict[int, Recall]:
        """By class: recall on retained rows before and after; without rows at hand as totals let expect."""
        if self.judge is not None:
            return self.judge.recall(before.answers, self.judge.answers(self.model, before.judged))
        return expected_recall(before.scores, scores_of(self.model.head), self.model.totals, self.model)

    def after(self, report: Report, before: Before) -> Trial:
        with report.stage("measure"):
            return Trial([], report, before, self._shares(before.judged), {}, None, [])


def _for_limits(before: Figures | None, after: Figures | None, recalls: dict[int, Recall]) -> Figures | None:
    """Retained accuracy as `Limits` reads it: on validation rows, or as totals let expect."""
    shares = [own and own["validation, retained"] for own in (before, after)]
    if None in shares and (expected := expected_accuracy(recalls)):
        shares = list(expected)
    return {
        state: {"validation": {"retain": own}} for state, own in zip(("original", "forgotten"), shares, strict=True)
    }
