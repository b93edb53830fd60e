"""What a model says of a row: one class of several, any of several labels, or values. The form of `y` tells which."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from fedup.errors import DataError, RequestError
from fedup.request import Forget
from fedup.target_words import MEASURE as MEASURE
from fedup.target_words import OUTPUT as OUTPUT
from fedup.target_words import Targets as Targets

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)


def kind_of(y: Tensor) -> Targets:
    """The targets of checked arrays: whole numbers are classes, truth values labels, other numbers values.

    >>> kind_of(torch.tensor([0, 2])), kind_of(torch.eye(2).bool()), kind_of(torch.randn(2, 1))
    ('classes', 'labels', 'values')
    """
    return "labels" if y.dtype == torch.bool else "values" if y.is_floating_point() else "classes"


def checked(y: Tensor, outputs: int | None = None) -> tuple[Tensor, int]:
    """The targets in their checked form, and how many outputs they need (or `outputs`, if that is given).

    Classes stay a vector of whole numbers. Labels become truth values (N, K). Values become single precision (N, K).
    """
    if y.ndim == 1 and y.dtype in _WHOLE:
        return y, _checked_classes(y, outputs)
    if y.ndim == 2 and (y.dtype == torch.bool or y.dtype in _WHOLE):
        y = _checked_labels(y)
    elif y.ndim in (1, 2) and y.is_floating_point():
        y = _checked_values(y if y.ndim == 2 else y[:, None])
    else:
        raise DataError(
            f"Targets must be a vector of whole numbers (classes), an array (N, K) of 0 and 1 (labels), or floating "
            f"point numbers (values); found shape {tuple(y.shape)} of {y.dtype}."
        )
    if not y.shape[1] or outputs not in (None, y.shape[1]):
        raise DataError(f"{y.shape[1]} targets for each row do not fit {outputs or 'one or more'} outputs.")
    return y, y.shape[1]


def checked_as(y: Tensor, targets: Targets, outputs: int) -> Tensor:
    """Labels or values in their checked form, of so many outputs. Whole numbers are values where values are meant, and
    0.0 and 1.0 labels where labels are. An error says nothing of them: clients send it."""
    if targets == "values":
        y = y.float()
    elif y.is_floating_point():
        y = torch.where((y == 0) | (y == 1), y, 2).long()  # 2 is refused below
    try:
        y, _ = checked(y, outputs)
        fits = kind_of(y) == targets
    except DataError:
        fits = False
    if not fits:
        raise DataError(f"The targets here are no {targets} of {outputs} outputs.")
    return y


def _checked_classes(y: Tensor, outputs: int | None) -> int:
    if not len(y):
        raise DataError("There is no row.")
    classes = int(y.max()) + 1 if outputs is None else outputs
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise DataError(f"Labels must lie in 0 … {classes - 1}; found {int(y.min())} … {int(y.max())}.")
    return classes


def _checked_labels(y: Tensor) -> Tensor:
    if y.dtype != torch.bool and not bool(((y == 0) | (y == 1)).all()):
        raise DataError(
            f"Several labels for each row are 0 or 1; found {int(y.min())} … {int(y.max())}. Values are floating "
            "point numbers: y.float()."
        )
    return y.bool()


def _checked_values(y: Tensor) -> Tensor:
    wrong = int((~y.isfinite()).any(1).sum())
    if wrong:
        raise DataError(f"{wrong} rows have a value that is NaN or infinite. Leave them out, or fill them in.")
    return y.float()


def check_request(request: Forget, targets: Targets) -> None:
    """Raise if the request names classes where there are none."""
    if request.class_ids and targets == "values":
        raise RequestError(
            f"To {request} means nothing here: the model gives values, and values have no classes. Name clients or "
            "samples; an output that nobody should see any more belongs out of the model's answers."
        )


def training_form(y: Tensor) -> Tensor:
    """The targets as `training_loss` takes them: classes as 64-bit numbers."""
    return y.long() if kind_of(y) == "classes" else y


def training_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for classes, binary cross entropy for labels, mean squared error for values."""
    if targets.dtype == torch.bool:
        return binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))
    if targets.is_floating_point():
        return mse_loss(outputs, targets.to(outputs.dtype))
    return cross_entropy(outputs, targets)


def hits(outputs: Tensor, targets: Tensor, deviations: Tensor) -> Tensor:
    """How right each output is, from 0 to 1, for labels or values. (N, K)

    A label is right or wrong. A value counts 1 − (error / deviation)², and errors beyond one deviation count 0: the
    mean over rows is R² with errors cut off, so that no single row or client outweighs the others.
    """
    if targets.dtype == torch.bool:
        return ((outputs > 0) == targets).double()
    errors = (outputs.double() - targets.double()) / deviations.to(outputs.device).double()
    return 1 - errors.square().clamp(max=1)


def group_rows(targets: Tensor) -> Tensor:
    """One whole number per row by which rows are alike, to deal them out to clients: (N,)

    The class; the rarest label of a row, or K without one; the tenth of the rows that the first value lies in.
    """
    match kind_of(targets):
        case "classes":
            return targets
        case "labels":
            rarest_first = targets.sum(0).argsort(stable=True)
            ordered = targets[:, rarest_first]
            return torch.where(ordered.any(1), rarest_first[ordered.int().argmax(1)], targets.shape[1])
        case _:
            first = targets if targets.ndim == 1 else targets[:, 0]
            place = first.argsort(stable=True).argsort(stable=True)  # the rank of each row
            return place * min(10, len(first)) // max(1, len(first))
