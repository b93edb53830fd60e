"""How good answers are: accuracy of classes, accuracy and F1 of labels, R² and RMSE of values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedup.request import Forget
from fedup.targets import kind_of


def score(outputs: Tensor, y: Tensor, only: Sequence[int] | None = None) -> float | None:
    """One number for some rows: accuracy, the mean accuracy of labels, or the mean R² of values; None without rows.

    `only` names the labels or values that count.

    >>> score(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [6.0]])) < 1
    True
    """
    if not len(y):
        return None
    if kind_of(y) == "classes":
        return float((outputs.argmax(1) == y).float().mean())
    every = by_output(outputs, y, outputs.shape[1])
    counting = [every[i] for i in (range(len(every)) if only is None else only)]
    known = [value for value in counting if value is not None]
    return sum(known) / len(known) if known else None


def by_output(outputs: Tensor, y: Tensor, num_outputs: int) -> list[float | None]:
    """Of each class its recall, of each label its accuracy, of each value R²; None where rows do not show it."""
    match kind_of(y):
        case "classes":
            right = outputs.argmax(1) == y
            return [_mean(right[y == label]) for label in range(num_outputs)]
        case "labels":
            return [_mean(column) for column in ((outputs > 0) == y).T]
        case _:
            wanted, given = _columns(y).double(), outputs.double()
            total = (wanted - wanted.mean(0)).square().sum(0) if len(y) else torch.zeros(outputs.shape[1])
            errors = (given - wanted).square().sum(0)
            pairs = zip(errors.tolist(), total.tolist(), strict=True)
            return [1 - error / spread if spread > 0 else None for error, spread in pairs]


def more_by_output(outputs: Tensor, y: Tensor) -> dict[str, list[float | None]]:
    """F1 of each label, or the root mean squared error of each value in its own units."""
    match kind_of(y):
        case "labels":
            said = outputs > 0
            right, named = (said & y).sum(0).tolist(), (said.sum(0) + y.sum(0)).tolist()
            return {"f1": [2 * hits / both if both else None for hits, both in zip(right, named, strict=True)]}
        case "values":
            errors = (outputs.double() - _columns(y).double()).square()
            return {"rmse": errors.mean(0).sqrt().tolist() if len(y) else [None] * outputs.shape[1]}
        case _:
            return {}


def forgotten_score(outputs: Tensor, y: Tensor, request: Forget) -> float | None:
    """The score on rows that a request names; for labels alone, how often their rows are answered yes."""
    if kind_of(y) == "labels" and request.class_ids and not (request.client_ids or request.sample_ids):
        labels = sorted(request.class_ids)
        return _mean((outputs[:, labels] > 0)[y[:, labels]])
    return score(outputs, y)


def answer_in_words(outputs: Tensor, targets: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """One row's answer as plain data, and in words: its class, the labels that say yes, or its values."""
    if targets == "labels":
        shares = outputs.sigmoid().tolist()
        said = [name for name, number in zip(names, outputs.tolist(), strict=True) if number > 0]
        probabilities = {name: round(share, 6) for name, share in zip(names, shares, strict=True)}
        return {"labels": said, "probabilities": probabilities}, ", ".join(said) or "none"
    if targets == "values":
        values = dict(zip(names, outputs.tolist(), strict=True))
        text = "\t".join(
            f"{value:.6g}" if len(values) == 1 else f"{name}={value:.6g}" for name, value in values.items()
        )
        return {"values": values}, text
    share, label = outputs.softmax(0).max(0)
    best, number = int(label), float(share)
    return {"class": best, "name": names[best], "probability": round(number, 6)}, f"{names[best]}\t{number:.3f}"


def _columns(y: Tensor) -> Tensor:
    """Values as (N, K), also where there is one of each row."""
    return y if y.ndim == 2 else y[:, None]


def _mean(right: Tensor) -> float | None:
    return float(right.float().mean()) if right.numel() else None
