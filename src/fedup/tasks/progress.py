"""Work that reports its progress."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """Clients in this process; counts their answers. `moments`: they may be asked for the same rows again, so their
    features are kept."""

    def __init__(
        self,
        federation: Federation,
        model: nn.Module,
        show: Progress,
        what: str,
        *,
        moments: bool,
        ledger: Ledger | None = None,
    ) -> None:
        make_reader = RememberingReader if moments else None
        super().__init__(federation, model, one_reader=True, make_reader=make_reader, ledger=ledger)
        self._show, self._what, self._answered, self._all = show, what, 0, len(self.clients)
        show(what, 0, self._all)

    def ask_everyone(
        self, question: Question[A], *, instead: Mapping[int, Question[A]] | None = None, but: Collection[int] = ()
    ) -> Iterator[tuple[int, A]]:
        self._answered, self._all = 0, len(set(self.clients) - set(but))  # asked again for moments on a better grid
        return super().ask_everyone(question, instead=instead, but=but)

    def _answer(self, client: int, question: Question[A]) -> A:
        answer = super()._answer(client, question)
        if isinstance(question, CentroidsQuestion | PrivateCentroidsQuestion | MomentsQuestion):
            self._answered += 1
            self._show(self._what, self._answered, self._all)
        return answer
