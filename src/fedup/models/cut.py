"""Where a model is cut: everything before the cut is the extractor, everything after it the tail."""

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedup.errors import CutError, DataError
from fedup.models.layout import Granularity, known_granularity
from fedup.models.views import shared_view

FEATURE_BATCH = 256  # features differ in the last bit between batch sizes: one size for every client

# Autograd nodes that keep the sign of what they get, and those whose result cannot be negative.
_SIGN_KEEPING = {
    *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Permute", "Transpose", "T", "Squeeze"),
    *("Unsqueeze", "Slice", "Select", "Expand", "Mean", "Sum", "Amax", "Max", "AvgPool2D", "AdaptiveAvgPool2D"),
    *("MaxPool2DWithIndices", "AdaptiveMaxPool2D"),
}
_NON_NEGATIVE = {"Relu", "Sigmoid", "Softmax", "Softplus", "Hardsigmoid", "Abs", "Exp"}


def find_cut(model: nn.Module, name: str | None = None) -> str:
    """The module whose input a filter sits at: the one named, or the last linear layer (also for "auto").

    >>> find_cut(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    '2'
    """
    modules = dict(model.named_modules())
    if name not in (None, "auto"):
        if name not in modules:
            raise CutError(f"The model has no module {name!r} to cut at; it has {', '.join(list(modules)[1:21])}.")
        return name
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linear:
        raise CutError(
            f"No linear layer was found in {type(model).__name__}, so there is no default place for a filter: "
            "name the module whose input holds the features, as in plug(model, cut='head')."
        )
    return linear[-1]


def offered_cuts(model: nn.Module, cut: str | None = None) -> dict[str, Granularity]:
    """The places for a filter that a model offers, from early to late, and what an eraser acts on there.

    A model says so in an attribute `cuts`: names, or names with `each` (every position of a map by itself, the usual
    way) or `tokens` (texts, where nothing has a fixed place). Without one these are the layers of a plain
    `nn.Sequential` from the second on; else `cut` alone, where the model was plugged, or the default one.

    >>> offered_cuts(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    {'2': 'each'}
    """
    own = getattr(model, "cuts", None)
    if isinstance(own, Mapping) and own:
        return {find_cut(model, name): known_granularity(over) for name, over in own.items()}
    if isinstance(own, tuple | list) and own:
        return {find_cut(model, name): "each" for name in own}
    if isinstance(model, nn.Sequential):
        layers = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
        if layers[1:]:
            return dict.fromkeys(layers[1:], "each")
    return {find_cut(model, cut): "each"}


def tail_of(model: nn.Module, cut: str) -> Callable[[Tensor], Tensor]:
    """What comes after the cut, as a function of the features.

    A model may define `tail(features, cut)` for cuts deep inside; a plain `nn.Sequential` is cut at any of its
    children; elsewhere the tail is the module at the cut. `read_features` checks that the tail completes the model.
    """
    own_tail: Any = getattr(model, "tail", None)
    if callable(own_tail) and not isinstance(own_tail, nn.Module) and "cut" in inspect.signature(own_tail).parameters:
        return partial(own_tail, cut=cut)
    if isinstance(model, nn.Sequential) and cut in dict(model.named_children()):
        children = list(model.named_children())
        start = [child for child, _ in children].index(cut)
        return nn.Sequential(*(module for _, module in children[start:]))
    return model.get_submodule(cut)


def flat_tail(model: nn.Module, cut: str, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The tail as a function of flattened features (N, D) of rows that have `shape` at the cut."""
    tail = tail_of(model, cut)
    dtype = next(model.parameters()).dtype  # features are kept in single precision, whatever the model computes in
    return lambda features: logits_of(tail(features.reshape(-1, *shape).to(dtype, copy=True))).float()


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, or its `.logits` (transformers)."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise CutError(f"The model must return a tensor of logits, or an object with .logits; found {type(output)}.")
    return logits


@dataclass(frozen=True)
class Features:
    """Features at a cut; `nonnegative` when the operation before the cut rules out negative values."""

    values: Tensor  # (N, D) in single precision
    nonnegative: bool
    shape: tuple[int, ...]  # of one row before it was flattened


def read_features(
    model: nn.Module,
    cut: str,
    x: Tensor,
    rows: Tensor,
    *,
    wanted: Tensor | None = None,
    batch_size: int = FEATURE_BATCH,
) -> Features:
    """What the frozen extractor makes of the wanted rows (a mask over `rows`), in eval mode, flattened to (N, D).

    Batches are laid out over all `rows`, so that a feature has the same bits whichever rows are wanted; rows that are
    not wanted are never read.
    """
    return FeatureReader(model, cut).read(x, rows, wanted=wanted, batch_size=batch_size)


class FeatureReader:
    """A view of the model that notes what arrives at the cut; one can read for many clients."""

    def __init__(self, model: nn.Module, cut: str) -> None:
        self.cut = cut
        self.view = shared_view(model)
        self.tail = tail_of(self.view, cut)
        self.view.get_submodule(cut).register_forward_pre_hook(self._note)
        self._passing = _Passing()
        self._head = _before(self.view, cut)
        self._known: tuple[bool, tuple[int, ...], torch.device] | None = None

    def read(
        self, x: Tensor, rows: Tensor, *, wanted: Tensor | None = None, batch_size: int = FEATURE_BATCH
    ) -> Features:
        """Features of the wanted rows, as `read_features` says."""
        counts = _wanted_in_batches(wanted, len(rows), batch_size)
        nonnegative, shape, device = self._probe(x, rows, wanted, sum(counts))
        values = torch.empty(sum(counts), math.prod(shape), device=device)
        masks = [None] * len(counts) if wanted is None else wanted.split(batch_size)
        for part, batch, mask in zip(values.split(counts), rows.split(batch_size), masks, strict=False):
            if len(part):
                part.copy_(self._read_batch(x, batch, None if len(part) == len(batch) else mask))
        _check_finite(values, rows if wanted is None else rows[wanted])
        return Features(values, nonnegative, shape)

    def _probe(
        self, x: Tensor, rows: Tensor, wanted: Tensor | None, count: int
    ) -> tuple[bool, tuple[int, ...], torch.device]:
        """What the operations before the cut tell, after a look at one row; once for a reader."""
        if self._known is None:
            chosen = rows if wanted is None else rows[wanted]
            first = x[chosen[:1]] if count else torch.zeros_like(x[:1])  # a blank tells the width
            nonnegative = self.is_nonnegative(first)
            features = self.check_tail(first)
            self._known = nonnegative, tuple(features.shape[1:]), features.device
        return self._known

    def _read_batch(self, x: Tensor, rows: Tensor, wanted: Tensor | None) -> Tensor:
        if wanted is not None:
            rows = torch.where(wanted, rows, rows[wanted][0])  # a wanted row stands in for those not to be read
        features = self.at_once(x.index_select(0, rows)).flatten(1)
        return features if wanted is None else features[wanted]

    @torch.no_grad()
    def at_once(self, batch: Tensor) -> Tensor:
        """Features of a batch at the cut, whatever they are. (B, *shape)"""
        features = self._head(batch) if self._head is not None else self(batch)[0]
        if len(features) != len(batch):
            raise CutError(
                f"The module at the cut {self.cut!r} gets {len(features)} rows of a batch of {len(batch)} at a time; a "
                "filter needs a module that sees a batch at once. Name another with cut=."
            )
        return features

    def _note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise CutError(f"The module at the cut {self.cut!r} gets no tensor as its first argument: cut elsewhere.")
        self._passing.seen.append(args[0].clone())  # a module that works in place would change it

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features at the cut and logits."""
        seen = self._passing.seen = []
        logits = logits_of(self.view(x))
        if len(seen) != 1:
            raise CutError(
                f"The module at the cut {self.cut!r} ran {len(seen)} times in one forward pass; a filter needs a "
                "module that runs once. Name another with cut=."
            )
        return seen[0], logits

    def is_nonnegative(self, x: Tensor) -> bool:
        """Decided from the operations that lead to the cut, never from values."""
        with torch.inference_mode(False), torch.enable_grad():
            inputs = x.detach().clone()
            if x.is_floating_point():
                inputs = inputs.requires_grad_().clone()  # so that a forward pass may write to its input
            node = self(inputs)[0].grad_fn
        while node is not None:
            operation = node.name().split("Backward")[0]
            if operation in _NON_NEGATIVE:
                return True
            if operation not in _SIGN_KEEPING or not node.next_functions:
                return False
            node = node.next_functions[0][0]
        return False

    def check_tail(self, x: Tensor) -> Tensor:
        """The features, if tail(features) gives the model's own probabilities; raises otherwise."""
        with torch.no_grad():
            features, logits = self(x)
            completed = logits_of(self.tail(features.clone()))
        if logits.ndim != 2:
            raise CutError(
                f"The model must give one row of logits for each input; found {tuple(logits.shape[1:])} each."
            )
        same = completed.shape == logits.shape and torch.allclose(
            completed.float().log_softmax(-1), logits.float().log_softmax(-1), atol=1e-3, rtol=1e-3
        )
        if not same and bool(logits.isfinite().all()):
            raise CutError(
                f"What follows the cut {self.cut!r} is more than that module: its output is not the model's. Give the "
                "model a method tail(features, cut), or cut before the last layer that runs."
            )
        return features


class _Passing(threading.local):
    """What a forward pass has met so far: each thread has its own."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


def _before(model: nn.Module, cut: str) -> nn.Module | None:
    """What comes before the cut as a model of its own, so that nothing after it need run; None where only the whole
    model knows the way."""
    children = list(model._modules.items())
    names = [name for name, _ in children]
    own_ways = model._forward_pre_hooks or model._forward_hooks or type(model).forward is not nn.Sequential.forward
    if own_ways or cut not in names or [module for _, module in children].count(model._modules[cut]) > 1:
        return None
    return nn.Sequential(*(module for _, module in children[: names.index(cut)] if module is not None)).eval()


def _wanted_in_batches(wanted: Tensor | None, rows: int, batch_size: int) -> list[int]:
    """How many rows of each batch are wanted; asked of the device once."""
    starts = range(0, rows, batch_size)
    if wanted is None:
        return [min(batch_size, rows - start) for start in starts]
    return torch.stack([part.sum() for part in wanted.split(batch_size)]).tolist() if rows else []


def _check_finite(values: Tensor, rows: Tensor) -> None:
    if bool(values.sum().isfinite()):  # one number tells nearly always; an overflowing sum is looked at row by row
        return
    bad = ~values.isfinite().all(1)
    if bool(bad.any()):
        raise DataError(
            f"{int(bad.sum())} of {len(rows)} rows have NaN or infinite features (first: row {int(rows[bad][0])}). "
            "Check the inputs, and the model's weights."
        )
