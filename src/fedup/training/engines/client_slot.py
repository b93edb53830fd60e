"""A client's place on the device: a model, its optimizer and a stream of random numbers, used again and again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedup.training.averaging import weights_of
from fedup.training.local import LocalTraining


class ClientSlot:
    """What a captured step reads and writes stays where it is: everything is set in place."""

    def __init__(self, number: int, model: nn.Module, local: LocalTraining, device: torch.device) -> None:
        self.number = number
        self.model = model.train()
        self.weights = weights_of(model)
        self.optimizer = local.start(model)
        self.generator = torch.Generator(device)
        self.stream = torch.cuda.Stream(device)


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
