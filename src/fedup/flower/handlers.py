"""What a node answers from: its own rows and rules, the model that is asked about, and what it keeps of features."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedup.clients.question import ClientData, ExactQuestion, Question
from fedup.errors import DataError
from fedup.federation import Client
from fedup.flower.node_data import Source, by_place, own, places_of
from fedup.flower.state import WEIGHTS, KeptReader, drop_features, keep, kept
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
    num_classes: int

    def model(self) -> nn.Module:
        """The model that is asked about: with the weights that came, which are kept from now on, or those that are."""
        if self.ask.weights is not None:
            model = self._loaded(self.ask.weights)
            keep(self.source.context, WEIGHTS, self.ask.weights, base=self.ask.base)
            return model
        try:
            return self._loaded(kept(self.source.context, WEIGHTS))
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
        readers = _Readers(model, self)
        data = replace(self.client_data(model, with_unseen=question.reads_held_out), readers=readers)
        self.drop_features(question, data)
        answer = question.with_places(partial(by_place, data)).answer(data)
        for reader in readers.values():
            reader.keep()
        return self.ok(question, answer)

    def client_data(self, model: nn.Module, *, like: Tensor | None = None, with_unseen: bool = False) -> ClientData:
        """The rows that the node trained on, and behind them those that it did not, where the model is."""
        x, y, ids = self.source.rows(like=like)
        device = next((weight.device for weight in model.parameters()), x.device)
        trained = torch.arange(len(y), device=device)
        if with_unseen:
            x, y = map(torch.cat, zip((x, y), self.source.unseen_rows(like=x), strict=True))
        unseen = torch.arange(len(trained), len(y), device=device)
        return ClientData(
            model,
            x.to(device),
            y.to(device),
            Client(self.source.number, trained, trained[:0], unseen),
            self.num_classes,
            ids=None if ids is None else ids.to(device),
            least_rows=self.source.policy.least_rows,
        )

    def drop_features(self, question: Question[Any], data: ClientData, *, quietly: bool = False) -> None:
        """Keep nothing of what is to be left out from now on: samples and whole classes."""
        samples, classes = question.leaves_out()
        labels = torch.tensor(sorted(classes), dtype=torch.int64, device=data.y.device)
        named = torch.isin(data.y[data.client.train], labels).nonzero().flatten().tolist()
        drop_features(self.source.context, {*places_of(data, samples, quietly=quietly), *named})

    def ok(self, question: Question[A], answer: A) -> Answer:
        """An answer in this node's name."""
        details, arrays = question.answer_message(answer)
        return Answer("ok", self.ask.base, {"client": self.source.number, **details}, arrays)


class _Readers(dict[str, KeptReader]):
    """Readers of features that may be here already, by cut."""

    def __init__(self, model: nn.Module, work: Work) -> None:
        super().__init__()
        self._model, self._work = model, work

    def __missing__(self, cut: str) -> KeptReader:
        source = self._work.source
        self[cut] = reader = KeptReader(self._model, cut, self._work.ask.base, source.context, source.policy.most_kept)
        return reader
