"""Features of rows at one cut or several, read in batches."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import CutError, DataError
from fedup.models.cut import logits_of, tail_of
from fedup.models.views import shared_view

FEATURE_BATCH = 256  # the last bit of features depends on the batch size: one size for every client

# Autograd nodes that keep the sign of their input, and those whose result cannot be negative.
_SIGN_KEEPING = {
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Permute", "Transpose", "T", "Squeeze"),
    *("Unsqueeze", "Slice", "Select", "Expand", "Mean", "Sum", "Amax", "Max", "AvgPool2D", "AdaptiveAvgPool2D"),
    *("MaxPool2DWithIndices", "AdaptiveMaxPool2D"),
}
_NON_NEGATIVE = {"Relu", "Sigmoid", "Softmax", "Softplus", "Hardsigmoid", "Abs", "Exp"}


@dataclass(frozen=True)
class Features:
    """Features at a cut; `nonnegative` when the operation before the cut rules out negative values."""

    values: Tensor  # (N, D) in single precision
    nonnegative: bool
    shape: tuple[int, ...]  # of one row before it was flattened
    shortened: int = 0  # rows that were shortened before they came from a cache


class FeatureReader:
    """A view of the model in eval mode that records the inputs of its cuts. One reader can serve many clients and
    several threads at a time.

    `read` gives all features at the first cut, and checks that the tail behind it completes the model. `batches` checks
    no tail: an eraser can sit where the rest of the model is no function of the features alone. Both use `at_once`, as
    do private releases (`fedup.statistics.private_features`).
    """

    def __init__(self, model: nn.Module, *cuts: str) -> None:
        self.cuts, self.cut = cuts, cuts[0]
        self._view = shared_view(model)
        self._head = _before(self._view, self.cut) if len(cuts) == 1 else None
        for cut in cuts:
            self._view.get_submodule(cut).register_forward_pre_hook(partial(self._note, cut))
        self._passing = threading.local()  # features of the current forward pass by cut; one per thread
        self._known: tuple[bool, tuple[int, ...], torch.device] | None = None

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        """Features of the wanted rows (a mask over `rows`) at the first cut, flattened to (N, D).

        Batches span all `rows`, so that features have the same bits whichever rows are wanted; rows that are not wanted
        are never read.
        """
        wanted = torch.ones_like(rows, dtype=torch.bool) if wanted is None else wanted
        masks, chosen = wanted.split(batch_size), rows[wanted]
        counts = torch.stack([mask.sum() for mask in masks]).tolist()  # one transfer from the device
        nonnegative, shape, device = self._probe(x, chosen)
        values = torch.empty(len(chosen), math.prod(shape), device=device)
        for part, batch, mask in zip(values.split(counts), rows.split(batch_size), masks, strict=True):
            if len(part):
                part.copy_(self._read_batch(x, batch, None if len(part) == len(batch) else mask))
        _check_finite(values, chosen, self.cut)
        return Features(values, nonnegative, shape)

    def batches(self, x: Tensor, rows: Tensor, batch_size: int = FEATURE_BATCH) -> Iterator[dict[str, Tensor]]:
        """Features of the rows at each cut, batch by batch, in single precision. (B, *shape) each"""
        for batch in rows.split(batch_size):
            features = {cut: values.float() for cut, values in self.at_once(x.index_select(0, batch)).items()}
            for cut, values in features.items():
                _check_finite(values.flatten(1), batch, cut)
            yield features

    @torch.no_grad()
    def at_once(self, batch: Tensor) -> dict[str, Tensor]:
        """Features of a batch at each cut, finite or not. (B, *shape) each"""
        with torch.autocast(batch.device.type, enabled=False):  # the same bits in any context of the caller
            features = {self.cut: self._head(batch)} if self._head is not None else self._pass(batch)[0]
        for cut, values in features.items():
            if len(values) != len(batch):
                raise CutError(
                    f"The module at the cut {cut!r} gets {len(values)} rows of a batch of {len(batch)} at a time; a "
                    "filter needs a module that sees each batch once and whole. Name another with cut=."
                )
        return features

    def check_tail(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """The features at the first cut; raises unless tail(features) gives the model's own probabilities, or its own
        outputs (`exact`)."""
        with torch.no_grad():
            features, output = self._pass(x)
            values, logits = features[self.cut], logits_of(output)
            completed = logits_of(tail_of(self._view, self.cut)(values.clone()))
        if logits.ndim != 2:
            raise CutError(f"The model must give a row of logits for each input; found {tuple(logits.shape[1:])} each.")
        found, expected = completed.float(), logits.float()
        if logits.shape[1] > 1 and not exact:  # a softmax of one number would hide every difference
            found, expected = found.log_softmax(-1), expected.log_softmax(-1)
        same = completed.shape == logits.shape and torch.allclose(found, expected, atol=1e-3, rtol=1e-3)
        if not same and bool(logits.isfinite().all()):
            raise CutError(
                f"What follows the cut {self.cut!r} is more than that module: its output is not the model's. Give the "
                "model a method tail(features, cut), or cut before the last layer that runs."
            )
        return values

    def _probe(self, x: Tensor, rows: Tensor) -> tuple[bool, tuple[int, ...], torch.device]:
        """Sign, shape and device of features, from one row; done once per reader."""
        if self._known is None:
            first = x[rows[:1]] if len(rows) else torch.zeros_like(x[:1])  # a blank row has the same shape
            nonnegative = self._is_nonnegative(first)
            features = self.check_tail(first)
            self._known = nonnegative, tuple(features.shape[1:]), features.device
        return self._known

    def _read_batch(self, x: Tensor, rows: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is not None:
            rows = torch.where(wanted, rows, rows[wanted][0])  # a wanted row stands in for those not to be read
        features = self.at_once(x.index_select(0, rows))[self.cut].flatten(1)
        return features if wanted is None else features[wanted]

    def _pass(self, x: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Features at each cut and the model's output."""
        seen: dict[str, list[Tensor]] = {cut: [] for cut in self.cuts}
        self._passing.seen = seen
        output = self._view(x)
        for cut, values in seen.items():
            if len(values) != 1:
                raise CutError(
                    f"The module at the cut {cut!r} ran {len(values)} times in one forward pass; a filter needs a "
                    "module that sees each batch once and whole. Name another with cut=."
                )
        return {cut: values[0] for cut, values in seen.items()}, output

    def _note(self, cut: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise CutError(f"The module at the cut {cut!r} gets no tensor as its first argument: cut elsewhere.")
        self._passing.seen[cut].append(args[0].clone())  # a module that works in place would change it

    def _is_nonnegative(self, x: Tensor) -> bool:
        """By the operations before the cut, never by values."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = x.detach().clone()
            if x.is_floating_point():
                inputs = inputs.requires_grad_().clone()  # a forward pass may write to its input
            node = self._pass(inputs)[0][self.cut].grad_fn
        while node is not None:
            operation = node.name().split("Backward")[0]
            if operation in _NON_NEGATIVE:
                return True
            if operation not in _SIGN_KEEPING or not node.next_functions:
                return False
            node = node.next_functions[0][0]
        return False


def _before(model: nn.Module, cut: str) -> nn.Module | None:
    """The layers before the cut as one model, so that nothing after it runs; None if the model is no plain sequence."""
    children = list(model._modules.items())
    names = [name for name, _ in children]
    own_ways = model._forward_pre_hooks or model._forward_hooks or type(model).forward is not nn.Sequential.forward
    if own_ways or cut not in names or [module for _, module in children].count(model._modules[cut]) > 1:
        return None
    if model.get_submodule(cut)._forward_pre_hooks:  # they may change the input of the cut
        return None
    return nn.Sequential(*(module for _, module in children[: names.index(cut)] if module is not None)).eval()


def _check_finite(values: Tensor, rows: Tensor, cut: str) -> None:
    if bool(values.sum().isfinite()):  # fast, and nearly always true; an overflowing sum is checked row by row
        return
    bad = ~values.isfinite().all(1)
    if bool(bad.any()):
        raise DataError(
            f"{int(bad.sum())} of {len(rows)} rows have NaN or infinite features at the cut {cut!r} (first: row "
            f"{int(rows[bad][0])}). Check the inputs, and the model's weights."
        )
