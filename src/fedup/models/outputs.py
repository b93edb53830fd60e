"""Whether a model fits its data: checked on two rows, before anything takes long."""

import traceback
from pathlib import Path

import torch
from torch import Tensor, nn

import fedup
from fedup.errors import DataError
from fedup.models.cut import logits_of
from fedup.models.views import shared_view
from fedup.targets import OUTPUT, kind_of


@torch.no_grad()
def check_outputs(model: nn.Module, x: Tensor, y: Tensor, num_outputs: int) -> None:
    """Raise unless the model takes such rows and gives an output for each class, label or value."""
    targets, weight = kind_of(y), next(model.parameters(), None)
    example = x[:2] if weight is None else x[:2].to(weight.device)
    try:
        outputs = logits_of(shared_view(model, frozen=True)(example))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        kind = f"{x.dtype} of shape {tuple(x.shape[1:])}".removeprefix("torch.")
        of_model = "" if weight is None else f", and its weights are {weight.dtype}".replace("torch.", "")
        raise DataError(
            f"{type(model).__name__} does not take these rows ({_where(error)}{type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). A row is {kind}{of_model}: floating point rows need the type of "
            "the weights, ids of words or categories int64."
        ) from error
    if targets == "classes" and len(y):
        num_outputs = int(y.max()) + 1  # a class without rows needs none
    found = outputs.shape[1] if outputs.ndim == 2 else None
    fits = found is not None and (found >= num_outputs if targets == "classes" else found == num_outputs)
    if not fits or len(outputs) != len(example):
        shape = "found one number" if found is None else f"it has {found}"
        raise DataError(
            f"The model needs an output for each {OUTPUT[targets]}, {num_outputs} in all, and {shape} for each row. "
            f"{_advice(targets, num_outputs)}"
        )


def _where(error: Exception) -> str:
    """The last line of the user's own code that the error went through, in words."""
    libraries = [Path(str(module.__file__)).parent for module in (torch, fedup)]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(each) for each in libraries)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name}(): " if own else ""


def _advice(targets: str, num_outputs: int) -> str:
    if targets == "values":
        return (
            f"End it with Linear(…, {num_outputs}); if the targets are classes, give them as whole numbers: y.long()."
        )
    return f"End it with Linear(…, {num_outputs}), or check the labels."
