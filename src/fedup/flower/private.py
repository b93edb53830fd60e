"""Questions under differential privacy at a node: checked without data, charged, and only then answered from rows.

A curious server may choose weights, classes and ids as it likes. So nothing that leaves the node depends on its rows
but the noisy numbers. What can be refused is refused before any row is read, with its reason. Then the charge is
written down. From there on there are two answers: the release, whose size and shape are public, or one fixed text.
"""

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedup.eraser_statistics import Question
from fedup.errors import ArtifactError, BudgetError, DataError, FedUPError
from fedup.federation import Client
from fedup.flower.answering import Work, about
from fedup.flower.holding import Holding
from fedup.flower.state import drop_features, release_once
from fedup.flower.wire import NONCE, ROW, Answer, blank_from
from fedup.privacy.dp import Layout
from fedup.privacy.guarantee import DP
from fedup.private_erasure import PlannedStatistics
from fedup.private_features import blank_row
from fedup.private_summary import PlannedSummary, check_classes
from fedup.request import Forget

FAILED = "This node was charged for the release and could not make it. Its own log says why; the charge stands."
MOST_CLASSES = 65_536
MOST_NUMBERS = 16_000_000  # of statistics: 128 MB in double precision
_LOG = logging.getLogger(__name__)
_WHOLE = torch.iinfo(torch.int64)
Plan = TypeVar("Plan")


class _Release(Protocol[Plan]):
    """What is asked for, read off the question's details; raises where they are out of shape."""

    what: str  # it is charged as

    def __init__(self, details: Mapping[str, Any], dp: DP) -> None: ...

    def plan(self, model: nn.Module, blank: Tensor) -> Plan:
        """All that can be checked with one blank row in place of data."""

    def answer(self, plan: Plan, work: Work, holding: Holding) -> Answer:
        """Made of the node's rows."""


class _Centroids:
    what = "centroids"

    def __init__(self, details: Mapping[str, Any], dp: DP) -> None:
        self.dp, self.cut, self.num_classes = dp, _text(details, "cut"), _num_classes(details)
        self.excluded, self.without = _numbers(details, "excluded"), _numbers(details, "without")
        every = frozenset(range(self.num_classes)) - self.without
        self.labels = every if details["labels"] is None else _numbers(details, "labels")
        check_classes(self.labels, self.num_classes)

    def plan(self, model: nn.Module, blank: Tensor) -> PlannedSummary:
        planned = PlannedSummary(
            model, blank, cut=self.cut, dp=self.dp, num_classes=self.num_classes, labels=self.labels
        )
        size = self.num_classes * Layout.of(self.dp, planned.basis.shape[1], self.num_classes).size
        if size > MOST_NUMBERS:
            raise DataError(f"The release would take {size:,} numbers, and at most {MOST_NUMBERS:,} are made.")
        return planned

    def answer(self, plan: PlannedSummary, work: Work, holding: Holding) -> Answer:
        named = torch.isin(holding.y, torch.tensor(sorted(self.without), dtype=torch.int64)).nonzero().flatten()
        drop_features(work.context, {*holding.known_places(self.excluded), *named.tolist()})
        rows = torch.arange(len(holding.y))
        summary = plan.answer(
            holding.x, holding.y, rows, client=holding.client, excluded=self.excluded, ids=holding.ids
        )
        return work.ok(about(summary, {}), {"vectors": summary.vectors, "counts": summary.counts})


class _Eraser:
    what = "eraser"

    def __init__(self, details: Mapping[str, Any], dp: DP) -> None:
        self.dp, self.cut, self.num_classes = dp, _text(details, "cut"), _num_classes(details)
        told = details["question"]
        self.requests = {str(name): _forget(one) for name, one in told["requests"].items()}
        self.gone = _forget(told["gone"])

    def plan(self, model: nn.Module, blank: Tensor) -> PlannedStatistics:
        return PlannedStatistics(model, blank, cut=self.cut, dp=self.dp, num_classes=self.num_classes)

    def answer(self, plan: PlannedStatistics, work: Work, holding: Holding) -> Answer:
        requests = {name: holding.translated_quietly(request) for name, request in self.requests.items()}
        question = Question(requests, holding.translated_quietly(self.gone))
        nothing = torch.empty(0, dtype=torch.int64)
        client = Client(holding.client, torch.arange(len(holding.y)), nothing, nothing)
        found = plan.answer(holding.x, holding.y, client, question)
        return work.ok({"clip": found.clip}, {"sums": found.sums, "counts": found.counts})


RELEASES: dict[str, Callable[[Mapping[str, Any], DP], _Release[Any]]] = {  # questions that can be under a guarantee
    "summarize": _Centroids,
    "gather privately": _Eraser,
}


def answer_privately(work: Work, kind: str, details: Mapping[str, Any], dp: DP) -> Answer:
    """The release, the same again where it was made already, or a refusal that nothing in the node's rows decides."""
    asked = RELEASES[kind](details, dp)
    if dp.unit != "record":
        raise DataError("A node knows no subjects: it protects records (unit='record').")
    model = work.make_model()
    _check_finite(model)
    row = None if details.get(ROW) is None else blank_from(details[ROW]).to(next(model.parameters()).device)
    plan = None if row is None else _planned(asked, model, row)
    client = work.source.client  # the user's own function, and none of data
    name, digest = str(details.get(NONCE, "")), _digest(work.base, details)

    def release() -> Answer:
        _charge(work, client, dp, asked.what)
        try:
            holding = work.source.holding_like(row).on(next(model.parameters()).device)
            return asked.answer(plan or asked.plan(model, blank_row(holding.x)), work, holding)
        except Exception:  # whatever it was, the server is told the same
            _LOG.exception("FedUP could not make a release that was charged; the server was not told why.")
            return Answer("failed", work.base, reason=FAILED)

    return release_once(work.context, kind, name, digest, release)


def _charge(work: Work, client: int, dp: DP, what: str) -> None:
    """On disk, or in the state, before any row is read; raises where the budget does not allow it."""
    try:
        work.ledger.spend(client, dp, what)
    except (BudgetError, ArtifactError):
        raise
    except (FedUPError, OSError) as error:  # what they say names paths of this machine
        raise DataError(
            "This node could not write to its account: no row was read and nothing was released."
        ) from error


def _planned(asked: _Release[Plan], model: nn.Module, row: Tensor) -> Plan:
    try:
        return asked.plan(model, row)
    except FedUPError:
        raise
    except Exception as error:  # the user's own model
        raise DataError(
            f"The model does not take a blank row of {tuple(row.shape[1:])}, {row.dtype} ({type(error).__name__})."
        ) from error


def _check_finite(model: nn.Module) -> None:
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise DataError("The weights that came hold NaN or infinity.")


def _digest(base: str, details: Mapping[str, Any]) -> str:
    """Of a question but for its name."""
    told = {key: value for key, value in details.items() if key != NONCE}
    return sha256(json.dumps([base, told], sort_keys=True).encode()).hexdigest()


# --- what a question says


def _text(details: Mapping[str, Any], name: str) -> str:
    if not isinstance(details[name], str):
        raise DataError(f"{name} must be a text.")
    return str(details[name])


def _num_classes(details: Mapping[str, Any]) -> int:
    number = details["num_classes"]
    if type(number) is not int or not 1 <= number <= MOST_CLASSES:
        raise DataError(f"num_classes must be a whole number from 1 to {MOST_CLASSES:,}.")
    return number


def _numbers(details: Mapping[str, Any], name: str) -> frozenset[int]:
    values = details[name]
    whole = isinstance(values, list) and all(type(one) is int and _WHOLE.min <= one <= _WHOLE.max for one in values)
    if not whole:
        raise DataError(f"{name} must be a list of whole numbers.")
    return frozenset(values)


def _forget(told: Mapping[str, Any]) -> Forget:
    samples = {int(client): _numbers(told["samples"], client) for client in told["samples"]}
    return Forget(_numbers(told, "clients"), _numbers(told, "classes"), samples)
