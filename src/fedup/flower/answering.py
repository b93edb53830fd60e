"""What a node answers to each kind of question that is under no guarantee, from its own rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedup import messages
from fedup.client import Summarizing, Summary, summarize
from fedup.contact import InProcess
from fedup.eraser_statistics import EVERY_CLASS, MOST_REFERENCE_ROWS, Question
from fedup.errors import DataError
from fedup.federation import Client, Federation
from fedup.filter_file import served_from
from fedup.flower.holding import Holding, Source
from fedup.flower.policy import Policy
from fedup.flower.state import KeptLedger, KeptReader, drop_features
from fedup.flower.wire import Answer
from fedup.plugging import Served
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.tally import MOST_CLASS_ROWS, TallyQuestion


@dataclass(frozen=True)
class Work:
    """One question at work; `make_model` gives the model it is about, or raises where there are no weights for it."""

    source: Source
    make_model: Callable[[], nn.Module]
    context: Context
    policy: Policy
    base: str
    most_kept: int  # bytes of features
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  # that came with the question

    @property
    def holding(self) -> Holding:
        """The node's rows."""
        return self.source.holding

    @property
    def ledger(self) -> Ledger:
        """The node's own account."""
        return KeptLedger(self.context, self.policy)

    def reader(self, model: nn.Module, cut: str) -> KeptReader:
        """Of features, which may be here already."""
        return KeptReader(model, cut, base=self.base, context=self.context, most_bytes=self.most_kept)

    def contact(self, num_classes: int) -> InProcess:
        """This node alone, as a federation in process."""
        mine, nothing = self.holding, torch.empty(0, dtype=torch.int64)
        held_x, held_y = self.source.held_out(like=mine)
        held_out = torch.arange(len(mine.y), len(mine.y) + len(held_y))
        alone = Client(mine.client, torch.arange(len(mine.y)), nothing, held_out)
        federation = Federation(torch.cat([mine.x, held_x]), torch.cat([mine.y, held_y]), (alone,), num_classes)
        return InProcess(federation, self.make_model(), ledger=self.ledger)

    def ok(self, details: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> Answer:
        """An answer in this node's name."""
        return Answer("ok", self.base, {"client": self.source.client, **details}, arrays or {})


def _who(work: Work, details: dict[str, Any]) -> Answer:
    return work.ok({})


def _labels(work: Work, details: dict[str, Any]) -> Answer:
    """The classes of some of the node's samples."""
    holding = work.holding
    places = sorted(holding.places(frozenset(map(int, details["samples"]))))
    return work.ok({"labels": [[int(holding.names[row]), int(holding.y[row])] for row in places]})


def _summarize(work: Work, details: dict[str, Any]) -> Answer:
    """The centroids of the node's cells; what is to be left out is never read."""
    how, excluded = Summarizing(**details["how"]), frozenset(map(int, details["excluded"]))
    wanted = None if details["labels"] is None else frozenset(map(int, details["labels"]))
    without = frozenset(map(int, details["without"]))
    model = work.make_model()
    named = torch.isin(work.holding.y, torch.tensor(sorted(without), dtype=torch.int64)).nonzero().flatten()
    drop_features(work.context, {*work.holding.places(excluded), *named.tolist()})
    holding, least = work.holding, work.policy.least_rows
    told = {
        label: n
        for label, n in holding.rows_by_label().items()
        if n >= least and label not in without and (wanted is None or label in wanted)
    }
    kept = holding.rows_by_label(excluded)
    enough = frozenset(label for label in told if kept.get(label, 0) >= least)
    reader = work.reader(model, details["cut"])
    summary = summarize(
        model,
        holding.x,
        holding.y,
        torch.arange(len(holding.y)),
        client=holding.client,
        cut=details["cut"],
        how=how,
        labels=enough,
        excluded=excluded,
        ids=holding.ids,
        reader=reader,
    )
    reader.keep()
    summary = _with_empty(summary, {label: holding.of_class(label, excluded) for label in told.keys() - enough})
    vectors = summary.vectors.half() if details.get("half") else summary.vectors
    return work.ok(about(summary, told), {"vectors": vectors, "counts": summary.counts})


def _with_empty(summary: Summary, empty: Mapping[int, frozenset[int]]) -> Summary:
    """The same with cells of which too little is retained: the server must know that they are empty now."""
    cells = {
        label: (size, ids) for label, size, ids in zip(summary.labels, summary.sizes, summary.excluded, strict=True)
    }
    cells |= {label: (0, ids) for label, ids in empty.items()}
    labels = tuple(sorted(cells))
    return replace(
        summary,
        labels=labels,
        sizes=tuple(cells[label][0] for label in labels),
        excluded=tuple(cells[label][1] for label in labels),
    )


def about(summary: Summary, rows: Mapping[int, int]) -> dict[str, Any]:
    """A summary but for its vectors and counts, as plain data."""
    return messages.summary_answer(summary, rows)[0]


def _question(work: Work, told: Mapping[str, Any]) -> Question:
    requests = {name: work.holding.translated(Forget.from_json(one)) for name, one in told["requests"].items()}
    return Question(requests, work.holding.translated(Forget.from_json(told["gone"])))


def _sketch(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    client, cut, over = work.holding.client, details["cut"], details["over"]
    found = contact.sketch_groups(client, cut=cut, over=over, question=question)
    least = min(work.policy.least_rows, MOST_REFERENCE_ROWS)
    retained = {label: one for label, one in found.retained.items() if one.count >= least}
    return work.ok(*messages.sketch_answer(replace(found, retained=retained)))


def _spreads(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    few = _classes_not_told(work, Forget.from_json(details["question"]["gone"]))
    weights = {
        name: {int(label): float(w) for label, w in of if int(label) not in few}
        for name, of in details["weights"].items()
    }
    found = contact.measure_groups(work.holding.client, cuts=details["cuts"], question=question, weights=weights)
    return work.ok(*messages.spreads_answer(found))


def _classes_not_told(work: Work, gone: Forget) -> set[int]:
    """Classes of which the node retains fewer rows than its policy asks for; with all together where that is less."""
    kept = work.holding.rows_by_label(gone.sample_ids.get(work.holding.client, frozenset()))
    kept = {label: n for label, n in kept.items() if label not in gone.class_ids}
    return {label for label, n in {**kept, EVERY_CLASS: sum(kept.values())}.items() if n < work.policy.least_rows}


def _moments(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    found = contact.second_moments(
        work.holding.client,
        cut=details["cut"],
        over=details["over"],
        positions=details["positions"],
        question=question,
    )
    return work.ok(*messages.moments_answer(found))


def _tally(work: Work, details: dict[str, Any]) -> Answer:
    contact, told = work.contact(int(details["num_classes"])), TallyQuestion.from_json(details["question"])
    question = replace(
        told,
        requests={name: work.holding.translated(request) for name, request in told.requests.items()},
        gone=work.holding.translated(told.gone),
    )
    before, after = (_filter(work, details[name], name) for name in ("before", "after"))
    found = contact.tally(work.holding.client, before=before, after=after, question=question)
    least = min(work.policy.least_rows, MOST_CLASS_ROWS)
    retained, held_out = (
        {label: one for label, one in counts.items() if one.rows >= least}
        for counts in (found.retained, found.held_out)
    )
    return work.ok(*messages.tally_answer(replace(found, retained=retained, held_out=held_out)))


def _filter(work: Work, header: dict[str, Any] | None, name: str) -> Served | None:
    """A filter that came with a question about this very model."""
    if header is None:
        return None
    if header.get("base") != work.base:
        raise DataError("A filter came that was made for another model.")
    parts = {key.removeprefix(f"{name}/"): one for key, one in work.arrays.items() if key.startswith(f"{name}/")}
    return served_from(parts, header)


KINDS: dict[str, Callable[[Work, dict[str, Any]], Answer]] = {
    "who": _who,
    "labels": _labels,
    "summarize": _summarize,
    "sketch": _sketch,
    "spreads": _spreads,
    "moments": _moments,
    "tally": _tally,
}
