"""What a node answers to each kind of question, from its own rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedup import messages
from fedup.centroids import how_from
from fedup.client import Summary, summarize, summarize_privately
from fedup.contact import InProcess
from fedup.contrast import Question
from fedup.federation import Client, Federation
from fedup.flower.holding import Holding, Source
from fedup.flower.policy import Policy
from fedup.flower.state import KeptLedger, KeptReader, drop_features, release_once
from fedup.flower.wire import NONCE, Answer
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Ledger
from fedup.request import Forget


@dataclass(frozen=True)
class Work:
    """One question at work; `make_model` gives the model it is about, or raises where there are no weights for it."""

    source: Source
    make_model: Callable[[], nn.Module]
    context: Context
    policy: Policy
    base: str
    most_kept: int  # bytes of features

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
        alone = Client(mine.client, torch.arange(len(mine.y)), nothing, nothing)
        federation = Federation(mine.x, mine.y, (alone,), num_classes)
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
    """The centroids, or the noisy statistics, of the node's cells; what is to be left out is never read."""
    how, excluded = how_from(details["how"]), frozenset(map(int, details["excluded"]))
    wanted = None if details["labels"] is None else frozenset(map(int, details["labels"]))
    without = frozenset(map(int, details["without"]))
    model = work.make_model()
    named = torch.isin(work.holding.y, torch.tensor(sorted(without), dtype=torch.int64)).nonzero().flatten()
    drop_features(work.context, {*work.holding.places(excluded), *named.tolist()})
    if isinstance(how, DP):
        every = frozenset(range(int(details["num_classes"]))) - without
        return _summarize_privately(work, model, details, how, every if wanted is None else wanted, excluded)
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
    return work.ok(_about(summary, told), {"vectors": vectors, "counts": summary.counts})


def _summarize_privately(
    work: Work, model: nn.Module, details: dict[str, Any], dp: DP, labels: frozenset[int], excluded: frozenset[int]
) -> Answer:
    holding = work.holding

    def release() -> Answer:
        work.ledger.check([holding.client], dp)  # before anything is computed
        reader = work.reader(model, details["cut"])
        summary = summarize_privately(
            model,
            holding.x,
            holding.y,
            torch.arange(len(holding.y)),
            client=holding.client,
            cut=details["cut"],
            dp=dp,
            num_classes=int(details["num_classes"]),
            labels=labels,
            excluded=excluded,
            subjects=None,
            ids=holding.ids,
            spend=lambda: work.ledger.spend(holding.client, dp, "centroids"),
            reader=reader,
        )
        reader.keep()
        return work.ok(_about(summary, {}), {"vectors": summary.vectors, "counts": summary.counts})

    return release_once(work.context, "summarize", str(details.get(NONCE, "")), release)


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


def _about(summary: Summary, rows: Mapping[int, int]) -> dict[str, Any]:
    return messages.summary_answer(summary, rows)[0]


def _question(work: Work, told: Mapping[str, Any]) -> Question:
    requests = {name: work.holding.translated(Forget.from_json(one)) for name, one in told["requests"].items()}
    return Question(requests, work.holding.translated(Forget.from_json(told["gone"])), bool(told["by_class"]))


def _shifts(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    found = contact.shifts(work.holding.client, cuts=details["cuts"], question=question)
    return work.ok(*messages.shifts_answer(found))


def _gather(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    found = contact.gather(
        work.holding.client,
        cut=details["cut"],
        over=details["over"],
        positions=details["positions"],
        question=question,
    )
    return work.ok(*messages.contrast_answer(found))


def _gather_privately(work: Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    dp = how_from(details["how"])
    assert isinstance(dp, DP)

    def release() -> Answer:
        work.ledger.check([work.holding.client], dp)  # before anything is computed
        found = contact.gather_privately(work.holding.client, cut=details["cut"], dp=dp, question=question)
        return work.ok({"clip": found.clip}, {"sums": found.sums, "counts": found.counts})

    return release_once(work.context, "gather", str(details.get(NONCE, "")), release)


RELEASES = ("summarize", "gather privately")  # questions that can be answered under a guarantee
KINDS: dict[str, Callable[[Work, dict[str, Any]], Answer]] = {
    "who": _who,
    "labels": _labels,
    "summarize": _summarize,
    "shifts": _shifts,
    "gather": _gather,
    "gather privately": _gather_privately,
}
