"""Work that reports its progress."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from fedup.clients.centroids import CentroidsQuestion
from fedup.clients.in_process import InProcess
from fedup.clients.moments import MomentsQuestion
from fedup.clients.private_centroids import PrivateCentroidsQuestion
from fedup.clients.question import Question
from fedup.federation import Federation
from fedup.models.remembered import RememberingReader
from fedup.privacy.ledger import Ledger
from fedup.training.fedavg import Observer

A = TypeVar("A")
Progress = Callable[[str, int, int], None]  # task, steps done, steps in all


class RoundsShown(Observer):
    """Counts the rounds of a training."""

    def __init__(self, show: Progress, what: str, rounds: int | Sequence[int]) -> None:
        self._show, self._what = show, what
        self._rounds = range(rounds) if isinstance(rounds, int) else rounds
        show(what, 0, len(self._rounds))

    def on_round(self, round_index: int, model: nn.Module) -> None:
        self._show(self._what, self._rounds.index(round_index) + 1, len(self._rounds))


class ClientsShown(InProcess):
    """Clients in this process; counts their answers."""

    def __init__(
        self, federation: Federation, model: nn.Module, show: Progress, what: str, *, ledger: Ledger | None = None
    ) -> None:
        super().__init__(federation, model, one_reader=True, make_reader=RememberingReader, ledger=ledger)
        self._show, self._what, self._answered = show, what, 0
        show(what, 0, len(self.clients))

    def _answer(self, client: int, question: Question[A]) -> A:
        answer = super()._answer(client, question)
        if isinstance(question, CentroidsQuestion | PrivateCentroidsQuestion | MomentsQuestion):
            self._answered = self._answered % len(self.clients) + 1  # all are asked again for moments on a better grid
            self._show(self._what, self._answered, len(self.clients))
        return answer
