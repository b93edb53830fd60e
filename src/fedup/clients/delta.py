"""A change of weights after which a client's forgotten rows look unseen."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch

from fedup.clients import checks
from fedup.clients.checks import require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.errors import DataError
from fedup.federation import named_rows
from fedup.filters.delta_fit import ClientDelta, DeltaRows, Outcome, fit_delta
from fedup.statistics.eraser_statistics import RowGroups

_LONGEST = 1.0  # change, in lengths of the changed weights: no small change is longer
_MEANS = "loss_before", "loss_after", "loss_unseen"


@dataclass(frozen=True)
class DeltaQuestion(ExactQuestion[ClientDelta]):
    """The change of weights for the rows of these requests, fitted by the client that holds them.

    The answer is derived from forgotten rows. It depends on this client's rows alone, whatever other requests say.
    """

    kind: ClassVar[str] = "delta"
    reported_as: ClassVar[str] = "a change of weights"
    reads_held_out: ClassVar[bool] = True

    cut: str
    groups: RowGroups

    def rows(self, data: ClientData) -> DeltaRows:
        """The client's rows that the answer depends on."""
        client, y = data.without(self.groups.finished).client, data.y
        named = [named_rows(client, request, client.train, y)[0] for request in self.groups.requests.values()]
        forgotten = torch.cat([client.train[:0], *named]).unique()
        retained = named_rows(client, self.groups.forget_set, client.train, y)[1]
        return DeltaRows(forgotten, retained, torch.cat([client.validation, client.heldout]))

    def answer(self, data: ClientData) -> ClientDelta:
        return fit_delta(data.model, self.cut, data.x, data.y, self.rows(data))

    def answer_message(self, answer: ClientDelta) -> Message:
        means = {name: getattr(answer, name) for name in _MEANS}
        return {"outcome": answer.outcome, **means}, dict(answer.changes)

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> ClientDelta:
        """Exactly the weights that such a delta changes, each of its shape; or none, and why."""
        outcome: Any = details.get("outcome")
        require(outcome in get_args(Outcome), "it says neither that it fitted a change nor why not")
        means = [_mean(details.get(name)) for name in _MEANS]
        wanted = {weight.name: weight.sent_shape for weight in facts.changed_weights(self.cut)}
        require(set(arrays) == (set(wanted) if outcome == "fitted" else set()), "it changes other weights than asked")
        changes = {name: checks.floats(arrays, name, shape) for name, shape in wanted.items() if name in arrays}
        require(all(change.dtype == torch.float32 for change in changes.values()), "a change is not in float32")
        fits = not changes or facts.relative_change(self.cut, changes) <= _LONGEST
        require(fits, "its change is longer than the weights themselves")
        return ClientDelta(outcome, changes, *means)


def _mean(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError("a mean loss is no number from 0")
    return float(value)
