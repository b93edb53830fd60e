"""The verdict on a request: measured with it and without it, everything else equal."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fedup.request import Forget
from fedup.statistics.proportions import Estimate, Paired, weighted
from fedup.statistics.tally import Tally
from fedup.targets import OUTPUT, Targets

Finding = Literal[
    "waiting",
    "not measured",
    "too few rows",
    "already like unseen",
    "forgotten",
    "farther than before",
    "partly",
    "unchanged",
]
CLOSE = 0.02  # an excess up to this counts as none
CLOSE_CLASS = 0.01  # the same for a class, whose reference is 0
WIDEST = 0.10  # a wider interval says too little

_MEASURES = {
    "classes": "Accuracy",
    "labels": "Share of right labels",
    "values": "R² (errors beyond one deviation count as one)",
}

# From best to worst: of several parts of one request the worst counts.
_WORDS: Mapping[Finding, str] = {
    "forgotten": "Forgotten",
    "already like unseen": "They looked unseen before, and they still do",
    "partly": "Forgotten in part",
    "too few rows": "Too few rows to tell whether they are forgotten",
    "not measured": "It was not measured whether they are forgotten",
    "unchanged": "Not forgotten: nothing changed for them",
    "farther than before": "Not forgotten: the filter makes the model know them better than before",
    "waiting": "Not forgotten yet, the request waits",
}


@dataclass(frozen=True)
class Side:
    """Shares of right answers to some rows, without the request and with it."""

    rows: float  # counted, or the effective number of weighted ones
    before: float
    after: float
    both: float  # right both times

    def __str__(self) -> str:
        return f"{self.before:.3f} → {self.after:.3f}"

    @property
    def counts(self) -> Paired:
        """The counts behind the shares."""
        return Paired(self.rows, *(self.rows * share for share in (self.before, self.after, self.both)))


@dataclass(frozen=True)
class Verdict:
    """One request's effect: `statistic` on its rows, `reference` on rows that were never trained on. `excess` is their
    difference, `change` what the request changed in it; all are shares of 1."""

    finding: Finding
    measure: str  # what is counted, in words
    statistic: Side | None = None
    reference: Side | None = None  # None for a class, which is compared with 0
    excess_before: Estimate | None = None
    excess_after: Estimate | None = None
    change: Estimate | None = None
    why: str = ""  # it was not measured, or need not be

    @property
    def is_good(self) -> bool:
        """Whether the rows are forgotten."""
        return self.finding in ("forgotten", "already like unseen")

    @property
    def words(self) -> str:
        """One sentence for people."""
        said = _WORDS[self.finding]
        if self.why:
            return f"{said}: {self.why}."
        if self.statistic is None or self.excess_after is None:
            return f"{said}."
        beside = f", on unseen rows {self.reference}" if self.reference else ""
        return f"{said}. {self.measure}: {self.statistic}{beside}."

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"words": self.words, "good": self.is_good}


def class_part(request: Forget) -> str:
    """The name for counts of a request's classes; its clients and samples are under its digest."""
    return f"{request.digest}:class"


def judge(request: Forget, tallies: Mapping[int, Tally], targets: Targets = "classes") -> Verdict:
    """The verdict on a request, from the clients' counts with it and without it."""
    verdicts = []
    if request.client_ids or request.sample_ids:
        of_rows = _judge_poison if request.reason == "poison" else _judge_withdrawal
        verdicts.append(of_rows(request.digest, tallies, _MEASURES[targets]))
    if request.class_ids:
        verdicts.append(_judge_class(class_part(request), tallies, targets))
    return max(verdicts, key=lambda verdict: list(_WORDS).index(verdict.finding))


def not_measured(why: str) -> Verdict:
    """A verdict that nothing was measured, and why."""
    return Verdict("not measured", "", why=why)


def never_answered(verdict: Verdict) -> Verdict:
    """The verdict on classes that a filter answers with for no input: no counts, few or wrong, can put that in
    doubt."""
    why = "the filter answers with the class for no input at all"
    if verdict.finding == "not measured":
        return Verdict("forgotten", "", why=why)
    if verdict.statistic is not None and verdict.statistic.after > 0:
        return replace(verdict, finding="forgotten", why=f"{why}, although clients have counted such answers")
    return replace(verdict, finding="forgotten") if verdict.finding == "too few rows" else verdict


def waits(why: str) -> Verdict:
    """A verdict that a request is not answered yet, and what it waits for."""
    return Verdict("waiting", "", why=why)


def _judge_class(name: str, tallies: Mapping[int, Tally], targets: Targets) -> Verdict:
    counts = _added(tally.forgotten.get(name, {}) for tally in tallies.values())
    measure = "Accuracy on held-out rows of the class"
    if targets == "labels":
        measure = "Share of held-out rows with the label that are answered yes"
    if not counts.rows:
        return not_measured(f"no client has held-out rows of the {OUTPUT[targets]}")
    before, after = counts.share_before, counts.share_after
    finding = find(before, after, counts.change, close=CLOSE_CLASS)
    return Verdict(finding, measure, _side(counts), None, before, after, counts.change)


def _judge_withdrawal(name: str, tallies: Mapping[int, Tally], measure: str) -> Verdict:
    """Compared with held-out rows of the same clients and labels, in the same proportions."""
    strata = []
    for tally in tallies.values():
        alike = tally.unseen.get(name, {})
        strata += [(own, alike.get(label, Paired())) for label, own in tally.forgotten.get(name, {}).items()]
    if not strata:
        return not_measured("no client that holds the rows could be asked")
    matched = [(own, other) for own, other in strata if other.rows]
    if not matched:
        return not_measured("there are no held-out rows of the same clients and labels")
    unseen = weighted((own.rows, other) for own, other in matched)
    return against(sum((own for own, _ in matched), Paired()), unseen, f"{measure} on the forgotten training rows")


def _judge_poison(name: str, tallies: Mapping[int, Tally], _: str) -> Verdict:
    """Compared with how often these labels are answered to others' held-out rows."""
    own = _added(tally.forgotten.get(name, {}) for tally in tallies.values())
    if not own.rows:
        return not_measured("no client that holds the rows could be asked")
    counting = [tally for tally in tallies.values() if name in tally.unseen]
    others = [tally for tally in counting if name not in tally.forgotten]
    unseen = _added(tally.unseen[name] for tally in others or counting)
    if not unseen.rows:
        return not_measured("there are no held-out rows of other clients")
    return against(own, unseen, "Share of the poisoned rows answered with the label they carry")


def against(own: Paired, unseen: Paired, measure: str) -> Verdict:
    """The verdict on rows, compared with unseen rows or with a model that never saw them."""
    before, after = own.share_before - unseen.share_before, own.share_after - unseen.share_after
    change = own.change - unseen.change
    return Verdict(find(before, after, change), measure, _side(own), _side(unseen), before, after, change)


def find(before: Estimate, after: Estimate, change: Estimate, *, close: float = CLOSE) -> Finding:
    """The first finding that holds, given the excess before and after, and its change."""
    if after.width > WIDEST:
        return "too few rows"
    if before.value <= CLOSE and change.low <= 0 <= change.high:
        return "already like unseen"
    if after.value <= close:
        return "forgotten"
    if change.value > CLOSE and change.low > 0:
        return "farther than before"
    if change.high < 0:
        return "partly"
    return "unchanged"


def _added(counts: Any) -> Paired:
    return sum((paired for by_label in counts for paired in by_label.values()), Paired())


def _side(counts: Paired) -> Side:
    both = counts.both / counts.rows if counts.rows else 0.0
    return Side(counts.rows, counts.share_before.value, counts.share_after.value, both)
