"""Two models side by side on rows that both may know: the one that is served, and one that may take its place."""

from typing import Any

import torch
from torch import Tensor, nn

from fedup.federation import Federation
from fedup.request import Forget
from fedup.target_words import SCORE
from fedup.tasks.evaluation import predict
from fedup.tasks.scores import by_output, score

_ENOUGH = 30  # validation rows of a class: from so many on, it is measured on them


def compare(served: nn.Module, candidate: nn.Module, federation: Federation, forget: Forget) -> dict[str, Any]:
    """Scores of both on validation rows of `federation`, which is what the candidate was trained on: of all, and of
    each output (classes with few such rows: on training rows). None where no row shows it."""
    outputs = [label for label in range(federation.num_classes) if label not in forget.class_ids]
    models = {"served": served, "candidate": candidate}
    answers = {name: _Answers(model, federation) for name, model in models.items()}
    return {
        "score": SCORE[federation.targets],
        "rows": len(federation.rows("validation")),
        **{
            name: {
                "validation": score(own.validation, own.y_validation, outputs),
                "per_class": {str(label): value for label, value in own.by_class().items() if label in outputs},
            }
            for name, own in answers.items()
        },
    }


class _Answers:
    """What a model answers to validation rows, and to training rows where these are needed."""

    def __init__(self, model: nn.Module, federation: Federation) -> None:
        self._model, self._federation = model, federation
        self.validation, self.y_validation = self._of(federation.rows("validation"))

    def _of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = self._federation.y[rows]
        return (predict(self._model, self._federation.x, rows) if len(rows) else y.new_zeros(0)), y

    def by_class(self) -> dict[int, float | None]:
        federation, count = self._federation, self._federation.num_classes
        values = by_output(self.validation, self.y_validation, count) if len(self.y_validation) else [None] * count
        if federation.targets != "classes":
            return dict(enumerate(values))
        rows = torch.bincount(self.y_validation, minlength=count).tolist()
        few = [label for label in range(count) if rows[label] < _ENOUGH]
        train = federation.rows("train")
        known = train[torch.isin(federation.y[train], torch.tensor(few, device=train.device))]
        if len(known):
            trained = by_output(*self._of(known), count)
            values = [trained[label] if label in few else value for label, value in enumerate(values)]
        return dict(enumerate(values))
