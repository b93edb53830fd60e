"""The weighted average of clients' weights, summed as they arrive: no copy per client."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
Load = Callable[..., None]  # writes the global weights into each of the given sets of weights


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, over the model's own memory."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


class RunningAverage:
    """The global weights, and the weighted sum of the clients' weights."""

    def __init__(self, start: Weights) -> None:
        self.current = {name: tensor.clone() for name, tensor in start.items()}
        self._sum = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        self._added = 0
        self._floats = [name for name, tensor in start.items() if tensor.is_floating_point()]
        self._counters = [name for name, tensor in start.items() if not tensor.is_floating_point()]
        self._largest: dict[torch.dtype, Tensor] = {}  # all counters of a type in one tensor: they are many and tiny

    def load(self, *clients: Weights) -> None:
        """Write the global weights into those of each client."""
        for names in (self._floats, self._counters):  # one call with mixed types would copy one by one
            if names:
                targets = [weights[name] for weights in clients for name in names]
                torch._foreach_copy_(targets, _pick(self.current, names) * len(clients))

    def add(self, weights: Weights, share: float, *, round_index: int = 0, client: int = 0) -> None:
        """Add a client's weights to the sum; other averages may use the round and the client."""
        torch._foreach_add_(_pick(self._sum, self._floats), _pick(weights, self._floats), alpha=share)
        for dtype, found in self._joined(weights).items():  # BatchNorm's count of batches: the largest, never a mean
            self._largest[dtype] = torch.maximum(self._largest[dtype], found) if self._added else found
        self._added += 1

    def finish(self) -> None:
        """The sum becomes the global weights; a round in which nobody trained changes nothing."""
        if not self._added:
            return
        self.current, self._sum = self._sum, self.current
        for dtype, largest in self._largest.items():
            counters = [self.current[name] for name in self._counters if self.current[name].dtype == dtype]
            parts = largest.split([counter.numel() for counter in counters])
            torch._foreach_copy_(counters, [part.view_as(it) for part, it in zip(parts, counters, strict=True)])
        torch._foreach_zero_(list(self._sum.values()))
        self._added = 0

    def _joined(self, weights: Weights) -> dict[torch.dtype, Tensor]:
        """Counters by type, one after another."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for name in self._counters:
            by_type.setdefault(weights[name].dtype, []).append(weights[name].flatten())
        return {dtype: torch.cat(counters) for dtype, counters in by_type.items()}


def _pick(weights: Weights, names: list[str]) -> list[Tensor]:
    return [weights[name] for name in names]
