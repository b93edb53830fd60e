"""Counts of right answers to a client's rows under two filters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError
from fedup.serving.filter_file import parts_of, served_from
from fedup.serving.plugged import Served, filtered_view
from fedup.statistics.proportions import Paired
from fedup.statistics.tally import LARGEST_COUNT, MOST_CLASS_ROWS, MOST_ROWS, RowsToCount, Tally, tally

_BY_CLASS = "retained", "held_out"


@dataclass(frozen=True)
class TallyQuestion(ExactQuestion[Tally]):
    """Counts of right answers under the filters before and after a request (None: the original), sent along."""

    kind: ClassVar[str] = "tally"
    reported_as: ClassVar[str] = "counts of answers"
    reads_held_out: ClassVar[bool] = True

    before: Served | None
    after: Served | None
    rows: RowsToCount

    def to_message(self) -> Message:
        details: dict[str, Any] = {"question": self.rows.to_json()}
        arrays: dict[str, Tensor] = {}
        for name, served in (("before", self.before), ("after", self.after)):
            details[name], parts = filter_to_message(name, served)
            arrays |= parts
        return details, arrays

    @classmethod
    def from_message(cls, details: Details, arrays: Arrays) -> Self:
        before, after = (filter_from(name, details[name], arrays) for name in ("before", "after"))
        return cls(before, after, RowsToCount.from_json(details["question"]))

    def check_model(self, base: str) -> None:
        if any(served is not None and served.base != base for served in (self.before, self.after)):
            raise DataError("A filter came that was made for another model.")

    def answer(self, data: ClientData) -> Tally:
        original, before, after = (filtered_view(data.model, served) for served in (None, self.before, self.after))
        counted = tally(data, self.rows, original=original, before=before, after=after)
        retained, held_out = (_enough(counts, data.least_rows) for counts in (counted.retained, counted.held_out))
        forgotten, unseen = (
            {name: _enough(counts, data.least_rows) for name, counts in by_request.items()}
            for by_request in (counted.forgotten, counted.unseen)
        )
        return Tally(retained, held_out, forgotten, unseen)

    def answer_message(self, answer: Tally) -> Message:
        return answer.to_json(), {}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> Tally:
        """There are no more hits than rows, and only requests that were named."""
        names = set(self.rows.requests)
        classes = facts.num_classes * (2 if facts.targets == "labels" else 1)  # of a label, rows with and without it
        by_request = (checks.by_request(details, part, names).items() for part in ("forgotten", "unseen"))
        retained, held_out = (_counts(details.get(part), classes, most=MOST_CLASS_ROWS) for part in _BY_CLASS)
        forgotten, unseen = ({name: _counts(of, classes, most=MOST_ROWS) for name, of in own} for own in by_request)
        return Tally(retained, held_out, forgotten, unseen)


def filter_to_message(name: str, served: Served | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """A filter without the clients and samples that it was made for, as a part of a question."""
    if served is None:
        return None, {}
    tensors, header = parts_of(_summed(served))
    return _without_names(header), {f"{name}/{part}": tensor for part, tensor in tensors.items()}


def filter_from(name: str, header: Any, arrays: Arrays) -> Served | None:
    """The inverse of `filter_to_message`."""
    parts = {key.removeprefix(f"{name}/"): part for key, part in arrays.items() if key.startswith(f"{name}/")}
    return None if header is None else served_from(parts, header)


def _enough(counts: Mapping[int, Paired], least: int) -> dict[int, Paired]:
    return {label: hits for label, hits in counts.items() if hits.rows >= least}


def _without_names(header: Mapping[str, Any]) -> dict[str, Any]:
    """A filter's header without the clients and samples that it was made for."""
    erasure = header["erasure"]
    if erasure is not None:
        erasure = {**erasure, "about": {"place": {"of": erasure["about"]["place"]["of"]}}}
    delta = header["delta"]
    if delta is not None:
        delta = {**delta, "questions": {}, "requests": []}
    return {**header, "requests": [], "question": None, "erasure": erasure, "delta": delta}


def _summed(served: Served) -> Served:
    """The same filter without who contributed which change."""
    return served if served.delta is None else replace(served, delta=served.delta.merged)


def _counts(reported: object, num_classes: int, *, most: int) -> dict[int, Paired]:
    """Counts by class, as if of at most `most` rows each, so that no node outvotes all others."""
    if not isinstance(reported, list):
        raise DataError("its counts are no list")
    counts: dict[int, Paired] = {}
    for row in reported:
        numbers = isinstance(row, list) and len(row) == 5 and all(type(number) in (int, float) for number in row)
        require(numbers, "a count is no row of five numbers")
        label, rows, before, after, both = row
        require(type(label) is int and 0 <= label < num_classes, "a label is out of range")
        require(type(rows) is int, "a number of rows is no whole number")
        require(label not in counts, "a label comes twice")
        require(0 < rows <= LARGEST_COUNT and 0 <= both <= min(before, after), "counts do not add up")
        require(max(before, after) <= rows and before + after - both <= rows + 1e-6, "there are more hits than rows")
        counts[label] = Paired(rows, before, after, both).at_most(most)
    return counts
