"""What a node answers from: its own rows and rules, the model that is asked about, and what it keeps of features."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from flwr.app import Context
from torch import nn

from fedup.clients.question import ClientData, ExactQuestion, Question
from fedup.federation import Client
from fedup.flower.node_data import Holding, Source
from fedup.flower.policy import Policy
from fedup.flower.state import KeptLedger, KeptReader, drop_features
from fedup.flower.wire import Answer
from fedup.models.features import FeatureReader
from fedup.privacy.ledger import Ledger

A = TypeVar("A")


@dataclass(frozen=True)
class Work:
    """One question at work; `make_model` gives the model it is about, or raises where there are no weights for it."""

    source: Source
    make_model: Callable[[], nn.Module]
    context: Context
    policy: Policy
    base: str
    most_kept: int  # bytes of features
    num_classes: int

    @property
    def ledger(self) -> Ledger:
        """The node's own account."""
        return KeptLedger(self.context, self.policy)

    def answer(self, question: ExactQuestion[Any]) -> Answer:
        """To a question that is under no guarantee."""
        question.check_model(self.base)
        model = self.make_model() if question.needs_model else nn.Module()
        holding = self.source.holding
        samples, _ = question.leaves_out()
        self.drop_features(question, holding, holding.places(samples))
        readers = _Readers(model, self)
        data = self.data(model, holding, readers)
        if question.reads_held_out:
            data = self._with_held_out(data, holding)
        answer = question.with_places(holding.translated).answer(_beside(model, data))
        readers.keep()
        return self.ok(question, answer)

    def data(
        self, model: nn.Module, holding: Holding, readers: Mapping[str, FeatureReader] | None = None
    ) -> ClientData:
        """The rows that the node trained on."""
        rows = torch.arange(len(holding.y))
        return ClientData(
            model,
            holding.x,
            holding.y,
            Client(holding.client, rows, rows[:0], rows[:0]),
            self.num_classes,
            ids=holding.ids,
            least_rows=self.policy.least_rows,
            readers=readers,
        )

    def _with_held_out(self, data: ClientData, holding: Holding) -> ClientData:
        """The same with rows behind them that the node did not train on."""
        x, y = self.source.held_out(like=holding)
        unseen = torch.arange(len(y)) + len(holding.y)
        client = replace(data.client, heldout=unseen)
        return replace(data, x=torch.cat([holding.x, x]), y=torch.cat([holding.y, y]), client=client)

    def drop_features(self, question: Question[Any], holding: Holding, samples: frozenset[int]) -> None:
        """Keep nothing of what is to be left out from now on: these samples, by place, and whole classes."""
        _, classes = question.leaves_out()
        if not samples and not classes:
            return
        named = torch.isin(holding.y, torch.tensor(sorted(classes), dtype=torch.int64)).nonzero().flatten()
        drop_features(self.context, {*samples, *named.tolist()})

    def ok(self, question: Question[A], answer: A) -> Answer:
        """An answer in this node's name."""
        details, arrays = question.answer_message(answer)
        return Answer("ok", self.base, {"client": self.source.client, **details}, arrays)


def _beside(model: nn.Module, data: ClientData) -> ClientData:
    """The same with all arrays where the model is, if it is anywhere."""
    device = next((weight.device for weight in model.parameters()), data.x.device)
    own = data.client
    client = Client(own.id, own.train.to(device), own.validation.to(device), own.heldout.to(device))
    ids = None if data.ids is None else data.ids.to(device)
    return replace(data, x=data.x.to(device), y=data.y.to(device), client=client, ids=ids)


class _Readers(Mapping[str, FeatureReader]):
    """Readers of features that may be here already."""

    def __init__(self, model: nn.Module, work: Work) -> None:
        self._model, self._work = model, work
        self._made: dict[str, KeptReader] = {}

    def __getitem__(self, cut: str) -> FeatureReader:
        if cut not in self._made:
            work = self._work
            self._made[cut] = KeptReader(
                self._model, cut, base=work.base, context=work.context, most_bytes=work.most_kept
            )
        return self._made[cut]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def keep(self) -> None:
        """What was read stays in the node's state."""
        for reader in self._made.values():
            reader.keep()
