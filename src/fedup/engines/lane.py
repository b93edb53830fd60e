"""A client's place on the device: a model, its optimizer and a stream of random numbers, used again and again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fedup.averaging import weights_of
from fedup.training import LocalTraining


class Lane:
    """What a captured step reads and writes stays where it is: everything is set in place."""

    def __init__(self, number: int, model: nn.Module, how: LocalTraining, device: torch.device) -> None:
        self.number = number
        self.model = model.train()
        self.weights = weights_of(model)
        self.optimizer = how.start(model)
        self.generator = torch.Generator(device)
        self.stream = torch.cuda.Stream(device)

    def restart(self, seed: int) -> None:
        """A fresh optimizer and stream of random numbers."""
        restart_optimizers([self])
        self.generator.manual_seed(seed)


def restart_optimizers(lanes: Sequence[Lane]) -> None:
    """Momenta and counts of all lanes to zero: with them an optimizer does what a new one does."""
    state = [
        value
        for lane in lanes
        for each in lane.optimizer.state.values()
        for value in each.values()
        if value is not None  # there is none without momentum
    ]
    if state:
        torch._foreach_zero_(state)


@contextmanager
def drawing_from(device: torch.device) -> Iterator[Callable[[torch.Generator], None]]:
    """Lets models draw from the stream of a generator of one's choice: they always ask the device's own."""
    default = torch.cuda.default_generators[device.index or 0]
    own = default.graphsafe_get_state()

    def draw_from(generator: torch.Generator) -> None:
        default.graphsafe_set_state(generator.graphsafe_get_state())

    try:
        yield draw_from
    finally:
        default.graphsafe_set_state(own)
