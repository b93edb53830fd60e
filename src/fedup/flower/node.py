"""A node's side: one query handler on the user's own ClientApp, which answers from the node's own rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedup.centroids import how_from
from fedup.client import Summary, summarize, summarize_privately
from fedup.contact import InProcess
from fedup.contrast import Question
from fedup.errors import BudgetError, DataError, FedUPError
from fedup.federation import Client, Federation, check_samples
from fedup.flower.policy import Policy, RefusedError
from fedup.flower.rows import Rows, rows_of
from fedup.flower.wire import QUERY, Answer, Ask, array_of, read_ask, tensor_of, write_answer
from fedup.moments import SHIFT_PARTS
from fedup.privacy.guarantee import DP
from fedup.privacy.ledger import Charge, Ledger
from fedup.request import Forget
from fedup.sharing import fingerprint

_WEIGHTS, _LEDGER = "fedup-weights", "fedup-ledger"  # records in the node's state
T = TypeVar("T")


def mount(
    app: ClientApp,
    *,
    data: Callable[[Context], Rows],
    model: Callable[[], nn.Module],
    ids: Callable[[Context], Sequence[int]] | None = None,
    client: Callable[[Context], int] | None = None,
    policy: Policy | None = None,
) -> None:
    """Let the app answer FedUP's questions.

    `data` gives the rows the node trained on and their labels, in the same order each time; `model` an untrained model,
    which takes the weights that the server sends; `ids` whole numbers that name the rows in sample requests (their
    places, where it is not given); `client` the number that names the node in client requests (its partition, or else
    the node's own number).
    """
    rules = policy or Policy()

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        told = _answer(message, context, lambda: _Holding.of(context, data, ids, client), model, rules)
        return Message(write_answer(told), reply_to=message)


@dataclass(frozen=True)
class _Holding:
    """The node's rows, and what they and it are called."""

    x: Tensor
    y: Tensor
    ids: Tensor | None
    client: int

    @classmethod
    def of(
        cls,
        context: Context,
        data: Callable[[Context], Rows],
        ids: Callable[[Context], Sequence[int]] | None,
        client: Callable[[Context], int] | None,
    ) -> "_Holding":
        x, y = rows_of(_own(lambda: data(context)))
        names = None if ids is None else _own(lambda: torch.as_tensor(ids(context), dtype=torch.int64))
        number = _own(lambda: client(context)) if client else context.node_config.get("partition-id", context.node_id)
        if len(x) != len(y) or (names is not None and (len(names) != len(y) or len(names.unique()) != len(names))):
            raise DataError("Rows, labels and ids must be as many, and each id must be there once.")
        return cls(x, y.long(), names, int(number))

    def rows_of(self, samples: frozenset[int]) -> frozenset[int]:
        """The places of samples."""
        if self.ids is None:
            return samples
        check_samples(self.ids, samples, self.client)
        return frozenset(torch.isin(self.ids, torch.tensor(sorted(samples))).nonzero().flatten().tolist())

    def translated(self, request: Forget) -> Forget:
        """A request with this node's samples by place, and nobody else's."""
        own = request.sample_ids.get(self.client)
        return Forget(request.client_ids, request.class_ids, {} if own is None else {self.client: self.rows_of(own)})


def _answer(
    message: Message, context: Context, hold: Callable[[], _Holding], blank: Callable[[], nn.Module], policy: Policy
) -> Answer:
    """The answer to a message; refusals and failures are answers, too. A failure tells its kind, never what it met."""
    base = ""
    try:
        ask = read_ask(message.content)
        base = ask.base
        details = dict(ask.details)
        if ask.kind not in _KINDS:
            raise DataError(f"There is no question of the kind {ask.kind!r}.")
        dp = how_from(details["how"]) if ask.kind in _RELEASES else None
        policy.check(ask.kind, dp if isinstance(dp, DP) else None)
        holding = hold()
        if isinstance(dp, DP):
            _KeptLedger(context, policy).check([holding.client], dp)  # before anything is computed
        model = _model(ask, context, lambda: _own(blank))
        if model is None:
            return Answer("needs weights", base)
        return _KINDS[ask.kind](_Work(holding, model, context, policy, base), details)
    except _OwnError as error:
        return Answer("failed", base, reason=str(error))
    except RefusedError as refusal:
        return Answer("refused", base, reason=str(refusal))
    except BudgetError as error:
        return Answer("refused", base, reason=str(error))
    except FedUPError as error:
        return Answer("failed", base, reason=str(error))
    except Exception as error:  # a failure of the user's own code must not end the node's run
        return Answer("failed", base, reason=type(error).__name__)


class _OwnError(Exception):
    """The user's own code failed; what it said stays here."""


def _own(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        raise _OwnError(type(error).__name__) from error


def _model(ask: Ask, context: Context, blank: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that is asked about: with the weights that came, or those that are kept; None where there are none."""
    kept = context.state.array_records.get(_WEIGHTS)
    weights = ask.weights
    if weights is None and kept is not None:
        weights = {name: tensor_of(array, name) for name, array in kept.items()}
    if weights is None:
        return None
    model = blank()
    try:
        model.load_state_dict(dict(weights))
    except (RuntimeError, KeyError) as error:
        raise DataError("The weights do not fit this node's model: it is of another shape.") from error
    model.eval().requires_grad_(False)
    if fingerprint(model) != ask.base:
        if ask.weights is None:
            return None  # those that are kept are of an earlier model
        raise DataError("The weights that came are not those that the question is about.")
    if ask.weights is not None:
        context.state[_WEIGHTS] = ArrayRecord({name: array_of(tensor) for name, tensor in ask.weights.items()})
    return model


class _KeptLedger(Ledger):
    """The node's own account, in its state."""

    def __init__(self, context: Context, policy: Policy) -> None:
        kept = context.state.config_records.get(_LEDGER)
        known = Ledger.from_json(json.loads(str(kept["json"]))) if kept else Ledger()
        super().__init__(known.charges, {None: policy.budget} if policy.budget else {})
        self._context = context

    def _record(self, charge: Charge) -> None:
        text = json.dumps({"charges": [asdict(one) for one in [*self.charges, charge]], "budgets": []})
        self._context.state[_LEDGER] = ConfigRecord({"json": text})


@dataclass(frozen=True)
class _Work:
    """One question at work."""

    holding: _Holding
    model: nn.Module
    context: Context
    policy: Policy
    base: str

    @property
    def ledger(self) -> Ledger:
        return _KeptLedger(self.context, self.policy)

    def contact(self, num_classes: int) -> InProcess:
        """This node alone, as a federation in process."""
        mine, nothing = self.holding, torch.empty(0, dtype=torch.int64)
        alone = Client(mine.client, torch.arange(len(mine.y)), nothing, nothing)
        federation = Federation(mine.x, mine.y, (alone,), num_classes)
        return InProcess(federation, self.model, ledger=self.ledger)

    def ok(self, details: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> Answer:
        return Answer("ok", self.base, {"client": self.holding.client, **details}, arrays or {})

    def rows_by_label(self) -> dict[int, int]:
        labels, counts = self.holding.y.unique(return_counts=True)
        return dict(zip(labels.tolist(), counts.tolist(), strict=True))


def _who(work: _Work, details: dict[str, Any]) -> Answer:
    return work.ok({})


def _summarize(work: _Work, details: dict[str, Any]) -> Answer:
    """The centroids, or the noisy statistics, of the node's cells; what is to be left out is never read."""
    holding, how = work.holding, how_from(details["how"])
    excluded = frozenset(map(int, details["excluded"]))
    wanted = None if details["labels"] is None else frozenset(map(int, details["labels"]))
    without = frozenset(map(int, details["without"]))
    rows = torch.arange(len(holding.y))
    if isinstance(how, DP):
        labels = frozenset(range(int(details["num_classes"]))) - without if wanted is None else wanted
        summary = summarize_privately(
            work.model,
            holding.x,
            holding.y,
            rows,
            client=holding.client,
            cut=details["cut"],
            dp=how,
            num_classes=int(details["num_classes"]),
            labels=labels,
            excluded=excluded,
            subjects=None,
            ids=holding.ids,
            spend=lambda: work.ledger.spend(holding.client, how, "centroids"),
        )
        return work.ok(_about(summary, {}), {"vectors": summary.vectors, "counts": summary.counts})
    least = work.policy.least_rows
    told = {
        label: n
        for label, n in work.rows_by_label().items()
        if n >= least and label not in without and (wanted is None or label in wanted)
    }
    kept = _retained(holding, rows, excluded)
    enough = frozenset(label for label in told if kept.get(label, 0) >= least)
    summary = summarize(
        work.model,
        holding.x,
        holding.y,
        rows,
        client=holding.client,
        cut=details["cut"],
        how=how,
        labels=enough,
        excluded=excluded,
        ids=holding.ids,
    )
    summary = _with_empty(summary, {label: _left_out(holding, label, excluded) for label in told.keys() - enough})
    vectors = summary.vectors.half() if details.get("half") else summary.vectors
    return work.ok(_about(summary, told), {"vectors": vectors, "counts": summary.counts})


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


def _left_out(holding: _Holding, label: int, excluded: frozenset[int]) -> frozenset[int]:
    names = torch.arange(len(holding.y)) if holding.ids is None else holding.ids
    return excluded & frozenset(names[holding.y == label].tolist())


def _retained(holding: _Holding, rows: Tensor, excluded: frozenset[int]) -> dict[int, int]:
    names = rows if holding.ids is None else holding.ids
    left = holding.y[~torch.isin(names, torch.tensor(sorted(excluded), dtype=names.dtype))]
    labels, counts = left.unique(return_counts=True)
    return dict(zip(labels.tolist(), counts.tolist(), strict=True))


def _about(summary: Summary, rows: Mapping[int, int]) -> dict[str, Any]:
    return {
        "labels": list(summary.labels),
        "sizes": list(summary.sizes),
        "excluded": [sorted(ids) for ids in summary.excluded],
        "rows": [[label, n] for label, n in sorted(rows.items())],
        "nonnegative": summary.nonnegative,
        "shape": list(summary.shape),
        "paper_epsilons": list(summary.paper_epsilons),
    }


def _labels(work: _Work, details: dict[str, Any]) -> Answer:
    """The classes of some of the node's samples."""
    samples = frozenset(map(int, details["samples"]))
    holding = work.holding
    places = holding.rows_of(samples)
    check_samples(torch.arange(len(holding.y)), places, holding.client)
    names = torch.arange(len(holding.y)) if holding.ids is None else holding.ids
    return work.ok({"labels": [[int(names[row]), int(holding.y[row])] for row in sorted(places)]})


def _question(work: _Work, told: Mapping[str, Any]) -> Question:
    requests = {name: work.holding.translated(Forget.from_json(one)) for name, one in told["requests"].items()}
    return Question(requests, work.holding.translated(Forget.from_json(told["gone"])), bool(told["by_class"]))


def _shifts(work: _Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    found = contact.shifts(work.holding.client, cuts=details["cuts"], question=question)
    arrays = {f"{cut}/{name}": getattr(shift, name) for cut, shift in found.items() for name in SHIFT_PARTS}
    return work.ok({"rows": {cut: shift.rows for cut, shift in found.items()}}, arrays)


def _gather(work: _Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    found = contact.gather(
        work.holding.client,
        cut=details["cut"],
        over=details["over"],
        positions=details["positions"],
        question=question,
    )
    if found is None:
        return work.ok({"none": True})
    arrays = {"sums": found.pooled.sums, "squares": found.pooled.squares}
    counts: dict[str, list[list[Any]]] = {"forgotten": [], "reference": []}
    for kind, groups in (("forgotten", found.forgotten), ("reference", found.reference)):
        for name, sums in groups.items():
            counts[kind].append([name, sums.count])
            arrays[f"{kind}/{name}"] = sums.sums
    return work.ok({"none": False, "count": found.pooled.count, **counts}, arrays)


def _gather_privately(work: _Work, details: dict[str, Any]) -> Answer:
    contact, question = work.contact(int(details["num_classes"])), _question(work, details["question"])
    dp = how_from(details["how"])
    assert isinstance(dp, DP)
    found = contact.gather_privately(work.holding.client, cut=details["cut"], dp=dp, question=question)
    return work.ok({"clip": found.clip}, {"sums": found.sums, "counts": found.counts})


_RELEASES = ("summarize", "gather privately")  # questions that can be answered under a guarantee
_KINDS: dict[str, Callable[[_Work, dict[str, Any]], Answer]] = {
    "who": _who,
    "summarize": _summarize,
    "labels": _labels,
    "shifts": _shifts,
    "gather": _gather,
    "gather privately": _gather_privately,
}
