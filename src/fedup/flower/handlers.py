"""What a node answers from: its own rows and rules, the model that is asked about, and what it keeps of features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedup.clients.question import ClientData, ExactQuestion, Question
from fedup.errors import DataError
from fedup.federation import Client
from fedup.flower.node_data import NodeData, Source, own
from fedup.flower.policy import Policy
from fedup.flower.state import KeptLedger, KeptReader, drop_features, keep_weights, kept_weights
from fedup.flower.wire import Answer, Ask, load_weights
from fedup.models.views import fingerprint

A = TypeVar("A")


class NeedsWeightsError(Exception):
    """The question is about a model whose weights are not here, or are not sound."""


@dataclass(frozen=True)
class Work:
    """One question at work."""

    ask: Ask
    source: Source
    policy: Policy
    num_classes: int

    @property
    def ledger(self) -> KeptLedger:
        """The node's own account."""
        return KeptLedger(self.source.context, self.policy)

    def model(self) -> nn.Module:
        """The model that is asked about, with the weights that came, or those that are kept."""
        if self.ask.weights is not None:
            model = self._loaded(self.ask.weights)
            keep_weights(self.source.context, self.ask.base, self.ask.weights)
            return model
        try:
            return self._loaded(kept_weights(self.source.context))
        except DataError as error:  # the state was damaged
            raise NeedsWeightsError from error

    def _loaded(self, weights: Mapping[str, Tensor]) -> nn.Module:
        model = load_weights(own(self.source.model), weights).eval().requires_grad_(False)
        if fingerprint(model) != self.ask.base:
            raise DataError("The weights that came are not those that the question is about.")
        return model

    def answer(self, question: ExactQuestion[Any]) -> Answer:
        """To a question that is under no guarantee."""
        question.check_model(self.ask.base)
        model = self.model() if question.needs_model else nn.Module()
        rows = self.source.node_data()
        self.drop_features(question, rows)
        readers = _Readers(model, self)
        held_out = self.source.held_out(like=rows) if question.reads_held_out else None
        data = self.client_data(model, rows, held_out=held_out, readers=readers)
        answer = question.with_places(rows.translated).answer(data)
        for reader in readers.values():
            reader.keep()
        return self.ok(question, answer)

    def client_data(
        self,
        model: nn.Module,
        rows: NodeData,
        *,
        held_out: tuple[Tensor, Tensor] | None = None,
        readers: "_Readers | None" = None,
    ) -> ClientData:
        """The rows that the node trained on, and behind them those that it held out, where the model is."""
        x, y, trained = rows.x, rows.y, torch.arange(len(rows.y))
        if held_out is not None:
            x, y = torch.cat([x, held_out[0]]), torch.cat([y, held_out[1]])
        unseen = torch.arange(len(trained), len(y))
        device = next((weight.device for weight in model.parameters()), x.device)
        return ClientData(
            model,
            x.to(device),
            y.to(device),
            Client(rows.client, trained.to(device), trained[:0].to(device), unseen.to(device)),
            self.num_classes,
            ids=None if rows.ids is None else rows.ids.to(device),
            least_rows=self.policy.least_rows,
            readers=readers,
        )

    def drop_features(self, question: Question[Any], rows: NodeData, *, quietly: bool = False) -> None:
        """Keep nothing of what is to be left out from now on: samples and whole classes."""
        samples, classes = question.leaves_out()
        of_classes = torch.isin(rows.y, torch.tensor(sorted(classes), dtype=torch.int64)).nonzero().flatten()
        drop_features(self.source.context, {*rows.places(samples, quietly=quietly), *of_classes.tolist()})

    def ok(self, question: Question[A], answer: A) -> Answer:
        """An answer in this node's name."""
        details, arrays = question.answer_message(answer)
        return Answer("ok", self.ask.base, {"client": self.source.client, **details}, arrays)


class _Readers(dict[str, KeptReader]):
    """Readers of features that may be here already, by cut."""

    def __init__(self, model: nn.Module, work: Work) -> None:
        super().__init__()
        self._model, self._work = model, work

    def __missing__(self, cut: str) -> KeptReader:
        work = self._work
        self[cut] = reader = KeptReader(self._model, cut, work.ask.base, work.source.context, work.policy.most_kept)
        return reader
