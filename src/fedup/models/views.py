"""Views of a model: separate module trees that share its tensors."""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from fedup.artifacts import digest_of
from fedup.errors import PlugError

_SPOTS = 64  # numbers of a tensor that `spot_check` reads
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: what every device can read from


def shared_view(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """A copy of the module tree in eval mode that shares the memory of `model`'s parameters and buffers.

    A view has its own hooks and mode, so `model` and other views never change. The parameters of a `frozen` view take
    no gradient, so nothing reaches the model's `.grad`.

    >>> model = nn.Linear(2, 2)
    >>> shared_view(model).weight is model.weight
    True
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in tensors(model)}
    if frozen:
        memo |= {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    # A module has a dozen empty dicts for hooks; copying those takes half of the time.
    parts = chain.from_iterable(vars(module).values() for module in model.modules())
    memo |= {id(part): OrderedDict() for part in parts if type(part) is OrderedDict and not part}
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
    return digest_of("", _named_tensors(model))


def spot_check(model: nn.Module) -> str:
    """sha256 over the same, but of each tensor only over 64 numbers, spread evenly: a small part of the time.

    Shows writes to whole tensors, but not to a few numbers.
    """
    named = sorted(_named_tensors(model), key=lambda pair: pair[0])
    at = {place: _spread_evenly(*place) for place in {(tensor.numel(), tensor.device) for _, tensor in named}}
    spots: dict[str, list[Tensor]] = {}  # by type and device: few copies from a GPU
    for _, tensor in named:
        bits = tensor.detach().view(_BITS.get(tensor.itemsize, tensor.dtype))
        spots.setdefault(f"{bits.dtype} {bits.device}", []).append(bits.take(at[bits.numel(), bits.device]))
    about = "".join(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};" for name, tensor in named)
    return digest_of(about, ((group, torch.cat(parts)) for group, parts in spots.items()))


def _spread_evenly(size: int, device: torch.device) -> Tensor:
    """Indices of a tensor's numbers, the first and the last among them."""
    count = min(size, _SPOTS)
    return torch.arange(count, device=device) * (size - 1) // max(1, count - 1)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, under each of their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
