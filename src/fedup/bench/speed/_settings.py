"""Models and made-up rows that speed is measured with: times do not depend on what the rows show."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedup.rng import generator
from fedup.tasks.models import build_model, training_of
from fedup.training.local import Job, LocalTraining

_PIECES = 30_522  # of the vocabulary that TinyBert reads


@dataclass(frozen=True)
class Setting:
    """A model with rows for it; a CPU gets fewer, so that a round takes about a second."""

    title: str
    model: str
    shape: tuple[int, ...]
    classes: int
    cpu_rows: int
    cpu_clients: int
    cpu_batch: int
    precision: str = "auto"
    gpu_rows: int = 12_800
    gpu_clients: int = 10
    gpu_batch: int = 64

    def local(self, device: torch.device) -> LocalTraining:
        """How clients train."""
        batch = self.gpu_batch if device.type == "cuda" else self.cpu_batch
        return LocalTraining(**{"batch_size": batch, **training_of(self.model), "precision": self.precision})

    def count(self, device: torch.device) -> tuple[int, int]:
        """Rows and clients."""
        return (self.gpu_rows, self.gpu_clients) if device.type == "cuda" else (self.cpu_rows, self.cpu_clients)

    def data(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and labels on the device."""
        source = generator(0, "speed", self.model)
        y = torch.randint(self.classes, (rows,), generator=source)
        if len(self.shape) == 1:
            x = torch.randint(1, _PIECES, (rows, *self.shape), generator=source)
            lengths = torch.randint(self.shape[0] // 2, self.shape[0] + 1, (rows, 1), generator=source)
            x.masked_fill_(torch.arange(self.shape[0]) >= lengths, 0)  # short texts are filled up
        else:
            x = torch.randn(rows, *self.shape, generator=source)
        return x.to(device), y.to(device)

    def build(self, device: torch.device) -> nn.Module:
        """The model with random weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_model(self.model, self.shape, self.classes).to(device)


LENET5 = Setting("LeNet-5", "lenet5", (1, 28, 28), 10, 3200, 10, 64, precision="float32")
RESNET18 = Setting("ResNet-18", "resnet18", (3, 32, 32), 10, 16, 2, 8)
VIT = Setting("ViT", "vit", (3, 32, 32), 10, 16, 2, 8)
TINYBERT = Setting("TinyBert", "tinybert", (64,), 4, 128, 4, 32)
SETTINGS = (LENET5, RESNET18, VIT, TINYBERT)


def even_jobs(rows: int, clients: int, config: LocalTraining) -> list[Job]:
    """A round of clients of equal size."""
    parts = torch.randperm(rows, generator=generator(0, "speed parts")).tensor_split(clients)
    return [Job(i, part, config, seed=i, share=len(part) / rows) for i, part in enumerate(parts)]
