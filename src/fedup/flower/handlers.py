"""How a node answers: from its own rows and rules, the model in question, and the features that it has kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from fedup.clients.messages import TARGETS
from fedup.clients.question import ClientData, ExactQuestion, Question, Readers
from fedup.errors import DataError
from fedup.federation import Client
from fedup.flower.node_data import Source, by_place, own, places_of
from fedup.flower.state import WEIGHTS, KeptReader, drop_features, keep, kept
from fedup.flower.wire import Answer, Ask, load_weights
from fedup.models.views import fingerprint
from fedup.targets import Targets

A = TypeVar("A")
Admit = Callable[[ExactQuestion[Any], ClientData], None]


class NeedsWeightsError(Exception):
    """The weights of the model in question are missing here, or damaged."""


@dataclass(frozen=True)
class Work:
    """One question that is being answered."""

    ask: Ask
    source: Source
    num_classes: int

    def model(self) -> nn.Module:
        """The model in question: with the weights that came, which are kept from now on, or with those kept before."""
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
            raise DataError("The weights that came are not those of the model in question.")
        return model

    def answer(self, question: ExactQuestion[Any], admit: Admit | None = None) -> Answer:
        """The answer to a question under no guarantee; `admit` may refuse it for these rows."""
        question.check_model(self.ask.base)
        model = self.model() if question.needs_model else nn.Module()
        context, most_bytes = self.source.context, self.source.policy.most_kept
        readers = Readers(lambda cut: KeptReader(model, cut, self.ask.base, context, most_bytes))
        data = self.client_data(model, with_unseen=question.reads_held_out, with_persons=question.reads_persons)
        data = replace(data, readers=readers)
        placed = question.with_places(partial(by_place, data))
        if admit is not None:
            admit(placed, data)
        self.drop_features(question, data)
        answer = placed.answer(data)
        for reader in readers.values():
            reader.keep()
        return self.ok(question, answer)

    def client_data(
        self, model: nn.Module, *, like: Tensor | None = None, with_unseen: bool = False, with_persons: bool = False
    ) -> ClientData:
        """The rows that the node trained on, followed by held-out ones, on the model's device."""
        targets = self._targets()
        x, y, ids = self.source.rows(like=like, targets=targets, outputs=self.num_classes)
        device = next((weight.device for weight in model.parameters()), x.device)
        trained = torch.arange(len(y), device=device)
        if with_unseen:
            x, y = map(torch.cat, zip((x, y), self.source.unseen_rows(like=(x, y)), strict=True))
        unseen = torch.arange(len(trained), len(y), device=device)
        persons, tags = self.source.persons(len(trained)) if with_persons else (None, None)
        return ClientData(
            model,
            x.to(device),
            y.to(device),
            Client(self.source.number, trained, trained[:0], unseen),
            self.num_classes,
            ids=None if ids is None else ids.to(device),
            subjects=None if persons is None else persons.to(device),
            subject_tags=tags,
            least_rows=self.source.limits.least_rows,
            few_rows=self.source.policy.few_rows,
        )

    def _targets(self) -> Targets:
        """What a row has by the question: a class, labels or values."""
        targets: Targets = self.ask.details.get(TARGETS, "classes")
        if targets not in get_args(Targets):
            raise DataError(f"Targets are {', '.join(get_args(Targets))}.")
        return targets

    def drop_features(self, question: Question[Any], data: ClientData, *, quietly: bool = False) -> None:
        """Delete kept features of samples and classes that are left out from now on."""
        samples, classes = question.leaves_out()
        labels = torch.tensor(sorted(classes), dtype=torch.int64, device=data.y.device)
        named = torch.isin(data.cell_labels, labels).nonzero().flatten().tolist()
        drop_features(self.source.context, {*places_of(data, samples, quietly=quietly), *named})

    def ok(self, question: Question[A], answer: A) -> Answer:
        """An answer of this node's client."""
        details, arrays = question.answer_message(answer)
        return Answer("ok", self.ask.base, {"client": self.source.number, **details}, arrays)
