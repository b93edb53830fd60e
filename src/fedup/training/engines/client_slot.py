"""A slot for one client on the device: model, optimizer and random numbers, reused for every job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedup.training.averaging import weights_of
from fedup.training.local import LocalTraining


class ClientSlot:
    """All its tensors are set in place: captured steps read and write fixed memory."""

    def __init__(
        self, number: int, model: nn.Module, local: LocalTraining, device: torch.device, *, rate: Tensor | None = None
    ) -> None:
        self.number = number
        self.model = model.train()
        self.weights = weights_of(model)
        self.optimizer = local.start(model, rate=rate)
        self.generator = torch.Generator(device)
        self.stream = torch.cuda.Stream(device)


@contextmanager
def drawing_from(device: torch.device) -> Iterator[Callable[[torch.Generator], None]]:
    """Lets models, which draw from the device's default generator, draw from another one."""
    default = torch.cuda.default_generators[device.index or 0]
    own = default.graphsafe_get_state()

    def draw_from(generator: torch.Generator) -> None:
        default.graphsafe_set_state(generator.graphsafe_get_state())

    try:
        yield draw_from
    finally:
        default.graphsafe_set_state(own)
