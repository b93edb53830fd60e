"""What server, nodes and the test share: a model that is not trained, and a node's rows in a file."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedup import DP

torch.set_num_threads(1)  # the same number of threads gives the same bits
EXAMPLE, NUM_CLASSES = torch.zeros(1, 1, 28, 28), 10


def make_model() -> nn.Module:
    """The same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)).eval()


def privacy(epsilon: float) -> DP | None:
    """Noise that can be replayed, so that a store can be compared; or none."""
    return DP(epsilon, clip="unit", replay_seed=1) if epsilon else None


def write_rows(out: Path, client: int, x: Tensor, y: Tensor, ids: Tensor) -> None:
    save_file({"x": x.contiguous(), "y": y.contiguous(), "ids": ids.contiguous()}, _path(out, client))


def read_rows(out: Path, client: int) -> dict[str, Tensor]:
    return load_file(_path(out, client))


def _path(out: Path, client: int) -> Path:
    return out / f"rows-{client}.safetensors"
