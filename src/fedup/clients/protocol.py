"""How a server reaches clients after training: in process, or over a real federation."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedup.clients.question import PrivateQuestion, Question
from fedup.errors import FedUPError
from fedup.privacy.guarantee import guarantee_of
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.statistics.traffic import Release, Traffic
from fedup.targets import Targets

A = TypeVar("A")


class Contact(Protocol):
    """Clients by number, and the way to ask them. Each answer is computed at the client, from its own rows."""

    @property
    def clients(self) -> Sequence[int]:
        """The numbers of all clients."""

    @property
    def num_classes(self) -> int:
        """The number of outputs: classes, labels or values."""

    @property
    def targets(self) -> Targets:
        """What the model learns."""

    @property
    def ledger(self) -> Ledger:
        """What the clients have spent of their privacy budgets."""

    @property
    def traffic(self) -> Traffic:
        """All messages so far, both ways, as serialised."""

    @property
    def vectors_folder(self) -> Path | None:
        """Where the vectors of a collection are stored on disk; None: in memory."""

    @property
    def near(self) -> bool:
        """Whether a question takes milliseconds: then clients are asked more often for a better answer."""

    def check(self, request: Forget) -> None:
        """Raise unless the request names known clients, classes and samples, and something stays."""

    def ask(self, questions: Mapping[int, Question[A]], *, optional: Collection[int] = ()) -> Iterator[tuple[int, A]]:
        """Each client's answer to its own question, in the order of the questions; all are asked together.

        What a budget forbids is refused before anybody is asked. If a client gives no answer, nobody's is returned
        (ContactError), unless the client is optional: then `silent` names it.
        """

    def ask_everyone(
        self, question: Question[A], *, instead: Mapping[int, Question[A]] | None = None, but: Collection[int] = ()
    ) -> Iterator[tuple[int, A]]:
        """Ask all clients but some the same question, and some another one `instead`; the answers, if enough came."""

    @property
    def silent(self) -> Mapping[int, str]:
        """Clients that did not answer their last question, and why."""

    @property
    def absent(self) -> Collection[int]:
        """Those of them that gave no reply at all, or that no node goes by; the others refused, or failed."""

    def failure(self, client: int) -> FedUPError:
        """Why a client that is there gave no answer to its last question, as an error."""

    def settled(self) -> None:
        """Say that the caller has stored what it made of all answers since the last call: cached answers are deleted.
        Without this call the same question gets the same answer again, at no cost in privacy."""


def ask_those_there(
    contact: Contact, questions: Mapping[int, Question[A]], *, bound: Collection[int] = ()
) -> dict[int, A]:
    """The answers of all clients that give one.

    A client that is absent holds up nobody. One that is there and refuses, or fails, is an error if it is `bound` to
    answer: the request is about its own rows.
    """
    answers = dict(contact.ask(questions, optional=questions.keys())) if questions else {}
    for client in questions:
        if client in bound and client not in answers and client not in contact.absent:
            raise contact.failure(client)
    return answers


def price_of(question: Question[Any]) -> float:
    """What a question costs a client, as μ²; infinitely much without a guarantee."""
    return question.dp.mu**2 if isinstance(question, PrivateQuestion) else math.inf


def check_budgets(ledger: Ledger, questions: Mapping[int, Question[Any]]) -> None:
    """Raise if a client's budget does not allow its question."""
    by_guarantee: dict[Any, list[int]] = {}
    for client, question in questions.items():
        dp = question.dp if isinstance(question, PrivateQuestion) else None
        by_guarantee.setdefault(dp, []).append(client)
    for dp, clients in by_guarantee.items():
        ledger.check(clients, dp) if dp is not None else ledger.check_exact(clients)


def release_of(question: Question[Any], client: int, *, size_bytes: int, cells: int, name: str) -> Release:
    """An answer as it is reported."""
    protection = question.protection
    mechanism, sigma = ("none", 0.0) if protection is None else (protection.mechanism, protection.sigma)
    name = name if isinstance(question, PrivateQuestion) else ""
    about = question.reported_as, mechanism, guarantee_of(protection)
    return Release(client, cells, size_bytes, *about, sigma, name)
