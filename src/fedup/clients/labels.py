"""The classes of some of a client's samples, and the client of a node."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedup.clients.checks import client_number, pairs, require
from fedup.clients.model_facts import ModelFacts
from fedup.clients.question import Arrays, ClientData, Details, ExactQuestion, Message
from fedup.federation import check_samples


@dataclass(frozen=True)
class WhoQuestion(ExactQuestion[int]):
    """Which client are you?"""

    kind: ClassVar[str] = "who"
    reported_as: ClassVar[str] = "its number"
    needs_model: ClassVar[bool] = False

    def answer(self, data: ClientData) -> int:
        return data.client.id

    def answer_message(self, answer: int) -> Message:
        return {}, {}  # every answer names its client

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> int:
        return client_number(details)


@dataclass(frozen=True)
class LabelsQuestion(ExactQuestion[dict[int, int]]):
    """The class of each of these samples; a sample that was not trained on is refused."""

    kind: ClassVar[str] = "labels"
    reported_as: ClassVar[str] = "classes of samples"
    needs_model: ClassVar[bool] = False

    samples: frozenset[int]

    def answer(self, data: ClientData) -> dict[int, int]:
        names = data.sample_ids
        check_samples(names, self.samples, data.client.id)
        own = torch.isin(names, torch.tensor(sorted(self.samples), dtype=names.dtype, device=names.device))
        return dict(sorted(zip(names[own].tolist(), data.cell_labels[own].tolist(), strict=True)))

    def answer_message(self, answer: dict[int, int]) -> Message:
        return {"labels": [[sample, label] for sample, label in sorted(answer.items())]}, {}

    def read(self, details: Details, arrays: Arrays, facts: ModelFacts) -> dict[int, int]:
        labels = dict(pairs(details, "labels"))
        require(labels.keys() == self.samples, "it has the classes of other samples")
        require(all(0 <= label < facts.num_cells for label in labels.values()), "a label is out of range")
        return labels
