"""Accuracies of a plugged model before and after its filter, and restored, on the data of a federation."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from fedup.bench.metrics.accuracy import predict
from fedup.federation import Federation, Part
from fedup.plugging import PluggedModel
from fedup.request import Forget

_PARTS: tuple[Part, ...] = ("validation", "heldout")


class FederationJudge:
    """Measures on validation and held-out rows, and on the training rows that are to be forgotten."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def __call__(self, plugged: PluggedModel, gone: Forget) -> dict[str, Any]:
        """Accuracies by state, part and side; `per_class` on held-out rows; None where there is no row."""
        federation = self._federation
        forgotten = federation.forgotten(gone, "train")
        rows = torch.cat([*(federation.rows(part) for part in _PARTS), forgotten])
        x = federation.x[rows]
        before = predict(plugged.base, x)
        logits = {"original": before, "forgotten": predict(plugged, x)}
        with plugged.restored():
            logits["restored"] = predict(plugged, x)
        figures: dict[str, Any] = {
            state: self._accuracies(rows, values.argmax(1), gone, len(forgotten)) for state, values in logits.items()
        }
        return figures | {"restored_bit_identical": torch.equal(before, logits["restored"])}

    def _accuracies(self, rows: Tensor, predicted: Tensor, gone: Forget, last: int) -> dict[str, Any]:
        federation = self._federation
        right = predicted == federation.y[rows]
        accuracies: dict[str, Any] = {}
        start = 0
        for part in _PARTS:
            here = slice(start, start + len(federation.rows(part)))
            start = here.stop
            named = torch.isin(rows[here], federation.forgotten(gone, part))
            accuracies[part] = {"retain": _share(right[here][~named]), "forget": _share(right[here][named])}
            if part == "heldout":
                labels = federation.y[rows[here]]
                accuracies["per_class"] = [
                    _share(right[here][labels == label]) for label in range(federation.num_classes)
                ]
        accuracies["train"] = {"forget": _share(right[len(rows) - last :])}
        return accuracies


def describe_rows(federation: Federation, request: Forget) -> dict[str, Any]:
    """How many training rows a request names, by client, and the sha256 of their ids: the hash of the forget set."""
    named = federation.forgotten(request)
    ids_of = {client.id: client.train[torch.isin(client.train, named)].tolist() for client in federation.clients}
    by_client = {client: ids for client, ids in ids_of.items() if ids}
    text = json.dumps([[client, ids] for client, ids in sorted(by_client.items())])
    return {
        "count": sum(map(len, by_client.values())),
        "clients": {str(client): len(ids) for client, ids in by_client.items()},
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _share(right: Tensor) -> float | None:
    return float(right.float().mean()) if len(right) else None
