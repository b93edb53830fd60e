"""Views of a model: separate module trees that share its tensors."""

import copy
from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from fedup.artifacts import digest_of
from fedup.errors import PlugError


def shared_view(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """A copy of the module tree in eval mode that shares the memory of `model`'s parameters and buffers.

    A view has its own hooks and mode, so `model` and other views never change. The parameters of a `frozen` view take
    no gradient, so nothing reaches the model's `.grad`.

    >>> model = nn.Linear(2, 2)
    >>> shared_view(model).weight is model.weight
    True
    """
    memo = {id(tensor): tensor for tensor in tensors(model)}
    if frozen:
        memo |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    try:
        return copy.deepcopy(model, memo).eval()
    except (RuntimeError, TypeError, ValueError) as error:
        raise PlugError(
            f"{type(model).__name__} cannot be viewed: a part of it cannot be copied ({error}). Remove kept "
            "activations, locks or open files from it, and run one batch through layers not initialised yet."
        ) from error


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    return chain(model.parameters(), model.buffers())


def fingerprint(model: nn.Module) -> str:
    """sha256 over sorted names, dtypes, shapes and bytes of all parameters and buffers."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return digest_of("", named)
