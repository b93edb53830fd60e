"""A node's own rows, their ids and its client number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedup.clients.question import ClientData
from fedup.errors import DataError
from fedup.federation import check_samples, number_subjects
from fedup.flower.node_record import NodeRecord
from fedup.flower.policy import Policy
from fedup.flower.rows import Rows, rows_of
from fedup.flower.rules import Rules
from fedup.flower.state import KeptLedger
from fedup.request import Forget
from fedup.subjects import SubjectKey
from fedup.targets import Targets, checked_as, kind_of

T = TypeVar("T")


class OwnError(Exception):
    """The user's own code failed; its message stays at the node."""


def own(function: Callable[..., T], *arguments: Context) -> T:
    """Call the user's own code; of a failure only the kind is passed on."""
    try:
        return function(*arguments)
    except Exception as error:
        raise OwnError(type(error).__name__) from error


@dataclass(frozen=True)
class Source:
    """The user's own functions and policy, as given to `mount`, which are called when needed; and the node's rules."""

    context: Context
    policy: Policy
    rules: Rules
    data: Callable[[Context], Rows]
    model: Callable[[], nn.Module]
    ids: Callable[[Context], Sequence[int]] | None = None
    client: Callable[[Context], int] | None = None
    held_out: Callable[[Context], Rows] | None = None
    subjects: Callable[[Context], Sequence[str]] | None = None
    subject_key: SubjectKey | None = None

    @property
    def ledger(self) -> KeptLedger:
        """The node's own account; with rules, as complete as its record says."""
        ledger = KeptLedger(self.context, self.limits, None if self.rules.open else self.number)
        if not self.rules.open:
            NodeRecord(self.rules).check_account(len(ledger.charges))
        return ledger

    @property
    def limits(self) -> Policy:
        """The node's rules and the app's policy together."""
        return self.rules.limits(self.policy)

    @cached_property
    def number(self) -> int:
        """The client number of the node."""
        if self.client is not None:
            return int(own(self.client, self.context))
        return int(self.context.node_config.get("partition-id", self.context.node_id % 2**63))  # signed where stored

    def rows(
        self, *, like: Tensor | None = None, targets: Targets = "classes", outputs: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The rows that the node trained on, their labels, and their ids if they have any; checked. Targets other than
        classes are those of so many outputs.

        For a release under differential privacy rows must be `like` a blank row. There may be none, and a label that is
        no whole number belongs to no class.
        """
        x, y = rows_of(own(self.data, self.context), blank=like, targets=targets)
        names = self.ids
        ids = None if names is None else own(lambda: torch.as_tensor(names(self.context), dtype=torch.int64))
        if len(x) != len(y) or (ids is not None and (len(ids) != len(y) or len(ids.unique()) != len(ids))):
            raise DataError("There must be one label and one id for each row, and each id must be there once.")
        if like is not None and not _alike(x, like):
            raise DataError("Rows have another shape or type than the question says.")
        if targets != "classes":
            return x, checked_as(y, targets, outputs), ids
        if y.ndim != 1:
            raise DataError(
                "Rows have several targets each. If they are labels or values, set contact.targets at the server."
            )
        whole = (y == y.round()) & (y.abs() < 2**31) if y.is_floating_point() else torch.ones_like(y, dtype=torch.bool)
        if like is None and not bool(whole.all()):
            raise DataError("A label is no whole number. If it is a value, set contact.targets at the server.")
        return x, torch.where(whole, y, -1).long(), ids

    def persons(self, rows: int) -> tuple[Tensor | None, dict[str, int] | None]:
        """A number for the person behind each row, and the numbers by tag; None if the node does not know them.

        A row of nobody known is a person of its own.
        """
        if self.subjects is None:
            return None, None
        ids = [str(subject) for subject in own(self.subjects, self.context)]
        if len(ids) != rows:
            raise DataError("There must be one person for each row, '' where it is unknown.")
        numbers, tags = number_subjects(ids, self.subject_key)
        if self.subject_key is None:  # what the node holds are tags
            tags = {tag: int(number) for tag, number in zip(ids, numbers.tolist(), strict=True) if number >= 0}
        alone = len(ids) + torch.arange(len(ids))
        return torch.where(numbers < 0, alone, numbers), tags

    def unseen_rows(self, *, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rows that the node did not train on, and their labels, like those trained on; none without `held_out`."""
        if self.held_out is None:
            return like[0][:0], like[1][:0]
        targets = kind_of(like[1])
        x, y = rows_of(own(self.held_out, self.context), targets=targets)
        if len(x) != len(y) or not _alike(x, like[0]):
            raise DataError("Held-out rows must have the shape and type of those trained on, and a label each.")
        return x, y.long() if targets == "classes" else checked_as(y, targets, like[1].shape[1])


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype


def places_of(data: ClientData, samples: frozenset[int], *, quietly: bool = False) -> frozenset[int]:
    """The places of samples. An unknown one raises; `quietly` it is ignored, so that nobody learns of it."""
    names = data.sample_ids
    if not quietly:
        check_samples(names, samples, data.client.id)
    wanted = torch.tensor(sorted(samples), dtype=torch.int64, device=names.device)
    return frozenset(torch.isin(names, wanted).nonzero().flatten().tolist())


def by_place(data: ClientData, request: Forget, *, quietly: bool = False) -> Forget:
    """A request with this node's samples by place, without those of others."""
    client = data.client.id
    mine = request.sample_ids.get(client)
    samples = {} if mine is None else {client: places_of(data, mine, quietly=quietly)}
    return Forget(request.client_ids, request.class_ids, samples)
