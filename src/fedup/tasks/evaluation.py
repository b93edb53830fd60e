"""Logits and accuracies of a model, and of a plugged model before, with and after its filter."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedup.federation import Federation, Part
from fedup.models.cut import logits_of
from fedup.models.views import shared_view
from fedup.request import Forget, union
from fedup.serving.plugged import PluggedModel
from fedup.target_words import SCORE
from fedup.tasks.scores import by_output, forgotten_score, more_by_output, score

_PARTS: tuple[Part, ...] = ("validation", "heldout")


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, rows: Tensor | None = None, *, batch_size: int = 512) -> Tensor:
    """Logits of the chosen rows, or of all, in batches: no second array of the data's size."""
    batches = x.split(batch_size) if rows is None else (x[chosen] for chosen in rows.split(batch_size))
    return torch.cat([logits_of(model(batch)) for batch in batches])


def accuracy(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor | None = None) -> float:
    """Share of rows (chosen, or all) whose largest logit is their label's; NaN without rows.

    Where the model learns labels or values, the accuracy by label or R² (`fedup.tasks.scores.score`).
    """
    labels = y if rows is None else y[rows]
    measured = score(predict(model, x, rows), labels) if len(labels) else None
    return float("nan") if measured is None else measured


def retain_and_forget(model: nn.Module, federation: Federation, request: Forget) -> dict[str, float]:
    """R-A on held-out rows that the request does not name, F-A on held-out rows that it names.

    Samples have no held-out rows: their F-A is the accuracy on the forgotten training rows.
    """
    forgotten = federation.forgotten(request, "train" if request.sample_ids else "heldout")
    retained = federation.retained(request, "heldout")
    return {
        "retain": accuracy(model, federation.x, federation.y, retained),
        "forget": accuracy(model, federation.x, federation.y, forgotten),
    }


def accuracy_per_class(model: nn.Module, x: Tensor, y: Tensor, num_classes: int) -> list[float]:
    """Recall of each class."""
    right = predict(model, x).argmax(1) == y
    return [float(right[y == label].float().mean()) for label in range(num_classes)]


class FederationJudge:
    """Measures on validation and held-out rows, and on the training rows that are to be forgotten."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def __call__(self, plugged: PluggedModel, requests: Collection[Forget]) -> dict[str, Any]:
        """Accuracies by state, part and side for all requests together, and by request on the rows it names.

        `per_class` is on held-out rows; None means no rows. Labels and values have their own scores in place of
        accuracy (`fedup.tasks.scores`), and `f1` or `rmse` of each output besides.
        """
        rows = self._rows(requests)
        x = self._federation.x
        before = predict(shared_view(plugged.base), x, rows)
        logits = {"original": before, "forgotten": predict(plugged, x, rows)}
        with plugged.restored():
            logits["restored"] = predict(plugged, x, rows)
        figures: dict[str, Any] = {
            state: self._accuracies(rows, values, union(requests)) for state, values in logits.items()
        }
        figures["by_request"] = {
            request.digest: {state: self._forgotten(rows, values, request) for state, values in logits.items()}
            for request in requests
        }
        score_name = {} if self._federation.targets == "classes" else {"score": SCORE[self._federation.targets]}
        return figures | score_name | {"restored_bit_identical": torch.equal(before, logits["restored"])}

    def alone(self, model: nn.Module, requests: Collection[Forget]) -> dict[str, Any]:
        """The same for one model, such as Retrain's."""
        rows = self._rows(requests)
        predicted = predict(model, self._federation.x, rows)
        return self._accuracies(rows, predicted, union(requests)) | {
            "by_request": {request.digest: self._forgotten(rows, predicted, request) for request in requests}
        }

    def _rows(self, requests: Collection[Forget]) -> Tensor:
        """Validation and held-out rows of all clients, then the training rows that are to be forgotten."""
        parts = [self._federation.rows(part) for part in _PARTS]
        return torch.cat([*parts, self._federation.forgotten(union(requests), "train")])

    def _accuracies(self, rows: Tensor, outputs: Tensor, forget: Forget) -> dict[str, Any]:
        federation, figures, start, y = self._federation, dict[str, Any](), 0, self._federation.y[rows]
        by_rows, counting = self._retained_by(forget)
        for part in _PARTS:
            here = slice(start, start + len(federation.rows(part)))
            start, own, given = here.stop, y[here], outputs[here]
            named, kept = (torch.isin(rows[here], federation.forgotten(each, part)) for each in (forget, by_rows))
            figures[part] = {
                "retain": score(given[~kept], own[~kept], counting),
                "forget": forgotten_score(given[named], own[named], forget),
            }
        held_out = outputs[here], y[here]
        figures |= {"per_class": by_output(*held_out, federation.num_classes), **more_by_output(*held_out)}
        return figures | {"train": {"forget": forgotten_score(outputs[start:], y[start:], forget)}}

    def _retained_by(self, forget: Forget) -> tuple[Forget, list[int] | None]:
        """What takes rows from those retained, and the outputs that count on them: forgotten labels take no row."""
        if self._federation.targets != "labels":
            return forget, None
        counting = [label for label in range(self._federation.num_classes) if label not in forget.class_ids]
        return replace(forget, class_ids=frozenset()), counting

    def _forgotten(self, rows: Tensor, outputs: Tensor, request: Forget) -> dict[str, float | None]:
        """The score on the rows that one request names, by part."""
        parts: tuple[Part, ...] = ("heldout", "train")
        masks = {part: torch.isin(rows, self._federation.forgotten(request, part)) for part in parts}
        y = self._federation.y[rows]
        return {part: forgotten_score(outputs[own], y[own], request) for part, own in masks.items()}


def describe_rows(federation: Federation, request: Forget) -> dict[str, Any]:
    """How many training rows a request names, in all and by client, and the sha256 of their ids."""
    named = federation.forgotten(request)
    ids_of = {client.id: client.train[torch.isin(client.train, named)].tolist() for client in federation.clients}
    by_client = {client: ids for client, ids in sorted(ids_of.items()) if ids}
    text = json.dumps(list(by_client.items()))
    return {
        "count": sum(map(len, by_client.values())),
        "clients": {str(client): len(ids) for client, ids in by_client.items()},
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
