"""Where a model is cut: everything before the cut is the extractor, everything after it the tail."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedup.errors import CutError
from fedup.models.layout import Granularity, known_granularity


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
    """The cuts that a model offers, from early to late, and what an eraser acts on at each.

    A model may list them in an attribute `cuts`: names, or names with `each` (every position of a map by itself, the
    default) or `tokens` (texts, where nothing has a fixed position). Without it they are the layers of a plain
    `nn.Sequential` from the second on; otherwise only `cut`, or the default cut.

    >>> offered_cuts(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    {'2': 'each'}
    """
    own = getattr(model, "cuts", None)
    if isinstance(own, Mapping | tuple | list) and own:
        named = own if isinstance(own, Mapping) else dict.fromkeys(own, "each")
        return {find_cut(model, name): known_granularity(granularity) for name, granularity in named.items()}
    if isinstance(model, nn.Sequential):
        layers = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
        if layers[1:]:
            return dict.fromkeys(layers[1:], "each")
    return {find_cut(model, cut): "each"}


def tail_of(model: nn.Module, cut: str) -> Callable[[Tensor], Tensor]:
    """What comes after the cut, as a function of the features.

    A model may define `tail(features, cut)` for inner cuts. A plain `nn.Sequential` can be cut at any child. Otherwise
    the tail is the module at the cut. `FeatureReader` checks that the tail completes the model.
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
    """The tail as a function of flattened features (N, D); one row has `shape` at the cut."""
    tail = tail_of(model, cut)
    dtype = next(model.parameters()).dtype  # features are stored in single precision, whatever the model's type
    return lambda features: logits_of(tail(features.reshape(-1, *shape).to(dtype, copy=True))).float()


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, or its `.logits` (transformers)."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise CutError(f"The model must return a tensor of logits, or an object with .logits; found {type(output)}.")
    return logits
