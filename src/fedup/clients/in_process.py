"""All clients in this process."""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedup.clients import messages
from fedup.clients.protocol import check_budgets, release_of
from fedup.clients.question import ClientData, ExactQuestion, PrivateQuestion, Question, Readers
from fedup.errors import ContactError, FedUPError, RequestError
from fedup.federation import Federation
from fedup.models.features import FeatureReader
from fedup.privacy.ledger import Ledger
from fedup.request import Forget
from fedup.statistics.private_features import blank_row
from fedup.statistics.traffic import Meter, Traffic
from fedup.targets import Targets

A = TypeVar("A")
_CHARGED_AT_ONCE = 64  # releases: as many are charged and not made, at most, where a process is killed


class InProcess:
    """All clients in this process.

    With `one_reader` they share a view of the model. This is faster, but the model must not be replaced: for a contact
    that lives for one call. `make_reader` may read features from a cache.
    """

    near = True

    def __init__(
        self,
        federation: Federation,
        model: nn.Module,
        *,
        one_reader: bool = False,
        make_reader: Callable[[nn.Module, str], FeatureReader] | None = None,
        ledger: Ledger | None = None,
        vectors_folder: str | Path | None = None,
    ) -> None:
        self.vectors_folder = None if vectors_folder is None else Path(vectors_folder)
        device = next(model.parameters()).device
        self._federation = federation if federation.x.device == device else federation.to(device)
        self._model = model
        self.ledger = Ledger() if ledger is None else ledger
        self._readers = Readers(lambda cut: (make_reader or FeatureReader)(model, cut)) if one_reader else None
        self._meter = Meter()
        self._charged: dict[int, tuple[str, Any]] = {}  # releases to be made: their names and plans
        self._failures: dict[int, FedUPError] = {}  # of clients that did not answer their last question

    @property
    def clients(self) -> Sequence[int]:
        return [client.id for client in self._federation.clients if len(client.train)]

    @property
    def num_classes(self) -> int:
        return self._federation.num_classes

    @property
    def targets(self) -> Targets:
        return self._federation.targets

    @property
    def traffic(self) -> Traffic:
        """The bytes that the same questions and answers would take over Flower."""
        return self._meter.traffic

    @property
    def absent(self) -> Collection[int]:
        return {client for client, error in self._failures.items() if isinstance(error, ContactError)}

    @property
    def silent(self) -> Mapping[int, str]:
        return {client: str(error) for client, error in self._failures.items()}

    def failure(self, client: int) -> FedUPError:
        return self._failures[client]

    def settled(self) -> None:
        """Nothing to do: no answers are cached here."""

    def check(self, request: Forget) -> None:
        self._federation.check(request)

    def ask(self, questions: Mapping[int, Question[A]], *, optional: Collection[int] = ()) -> Iterator[tuple[int, A]]:
        self._check(questions)
        self._failures = {client: why for client, why in self._failures.items() if client not in questions}
        return iter(list(self._answers(questions, optional)))  # all answers, or none

    def ask_everyone(
        self, question: Question[A], *, instead: Mapping[int, Question[A]] | None = None, but: Collection[int] = ()
    ) -> Iterator[tuple[int, A]]:
        questions = {client: (instead or {}).get(client, question) for client in self.clients if client not in but}
        self._check(questions)
        return self._answers(questions, ())

    def _check(self, questions: Mapping[int, Question[A]]) -> None:
        """Raise if a budget or a client's data does not allow a question, before anybody is charged."""
        check_budgets(self.ledger, questions)
        for client, question in questions.items():
            if isinstance(question, PrivateQuestion):
                question.check_data(self._data(client))

    def _answers(self, questions: Mapping[int, Question[A]], optional: Collection[int]) -> Iterator[tuple[int, A]]:
        waiting = list(questions.items())
        for start in range(0, len(waiting), _CHARGED_AT_ONCE):
            some = waiting[start : start + _CHARGED_AT_ONCE]
            self._charge(some)
            for client, question in some:
                try:
                    yield client, self._answer(client, question)
                except (ContactError, RequestError) as error:
                    if client not in optional:
                        raise
                    self._failures[client] = error

    def _charge(self, questions: Sequence[tuple[int, Question[A]]]) -> None:
        """Charge the releases that clients are about to make: in one step, before any of them draws noise."""
        plans: dict[int, Any] = {}  # clients with the same question share one
        with self.ledger.together():
            for client, question in questions:
                if isinstance(question, PrivateQuestion):
                    data, name = self._data(client), secrets.token_hex(16)
                    if id(question) not in plans:
                        reader = data.shared_reader(question.cut)
                        plans[id(question)] = question.plan(data.model, blank_row(data.x), data.num_classes, reader)
                    self.ledger.spend(client, question.dp, question.charged_as, name)
                    self._charged[client] = name, plans[id(question)]

    def _answer(self, client: int, question: Question[A]) -> A:
        data, name = self._data(client), ""
        if isinstance(question, PrivateQuestion):
            name, plan = self._charged.pop(client)
            answer = question.release(plan, data)
        else:
            assert isinstance(question, ExactQuestion)  # there is no third kind
            answer = question.answer(data)
        self._count(client, question, answer, name)
        return answer

    def _data(self, client: int) -> ClientData:
        own, readers = self._federation, self._readers
        rows = self._model, own.x, own.y, own.client(client), own.num_classes
        return ClientData(*rows, subjects=own.subjects, subject_tags=own.subject_tags or None, readers=readers)

    def _count(self, client: int, question: Question[A], answer: A, name: str) -> None:
        """Count the bytes of a question and its answer."""
        base, (details, sent), (reply, arrays) = "0" * 64, question.to_message(), question.answer_message(answer)
        details = {**details, "num_classes": self.num_classes}
        if self.targets != "classes":
            details[messages.TARGETS] = self.targets
        if name:  # messages about a release are that much longer
            details, reply = {**details, messages.NONCE: name}, {**reply, messages.NONCE: name, messages.SPENT: 0.1}
        self._meter.sent(messages.message_size(messages.question_text(question.kind, base, details), sent))
        size = messages.message_size(messages.answer_text("ok", base, {"client": client, **reply}), arrays)
        cells = question.cells_in(reply)
        self._meter.came(client, size, release_of(question, client, size_bytes=size, cells=cells, name=name))
